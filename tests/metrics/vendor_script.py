"""The script of test_vendor.py, through the vendor's collector: `vendor_script.py URL KEY FOLDER`."""

from __future__ import annotations

import json
import sys

from syvain_metrics_collector import Collector

url, key, folder = sys.argv[1:]
script = json.loads(sys.stdin.read())
collector = Collector(key, host=url, folder_id=folder)
experiment = collector.experiment(script["slug"], script["description"], script["meta"])
try:
    with experiment.run():
        for kind, what in script["events"]:
            if kind == "metric":
                experiment.metric(what["name"], what["value"], step=what["step"], metadata=what["metadata"], timestamp=what["time"])
            else:
                experiment.annotation(what["text"], step=what["step"], metadata=what["metadata"])
        if script["error"]:
            raise ValueError(script["error"])
except ValueError:
    pass
experiment.flush_or_raise(20)
