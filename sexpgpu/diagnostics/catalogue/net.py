"""Codes E-NET-…: title and page of each. A code is never reused."""

from sexpgpu.diagnostics.core import Entry

CODES: dict[str, Entry] = {
    "E-NET-002": Entry(
        "unknown storage scheme",
        """\
A location begins with a scheme that is not known.

Why: Local paths need none.

Wrong:
    --checkpoint-dir ftp://host/x

Right:
    --checkpoint-dir checkpoints
""",
    ),
    "E-NET-010": Entry(
        "S3 value not set",
        """\
A location is on S3, and one of the four values that its role needs is set nowhere: key id, secret key, endpoint, region.

Why: Each value is looked up by itself: the role's own variable, then the one both roles share, then the plain one. No profile and no
configuration file is read, so a run depends on nothing that its environment does not show.

Wrong:
    export SEXPGPU_CHECKPOINT_DIR=s3://bucket/run

Right:
    export AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=… AWS_ENDPOINT_URL=https://… AWS_REGION=…
""",
    ),
    "E-NET-011": Entry(
        "S3 server not reached",
        """\
Requests to the S3 server failed again and again: nothing got through for half a minute at the start, or for two minutes later.

Why: A server that restarts or is busy is waited for; one that is not there is an error and never an empty location.

Wrong:
    export AWS_ENDPOINT_URL=https://sorage.example

Right:
    export AWS_ENDPOINT_URL=https://storage.example
""",
    ),
    "E-NET-012": Entry(
        "S3 key refused",
        """\
The server does not know the key id, or the secret key or session token does not belong to it, or the token has expired.

Why: Values of one role may come from different variables, so one of another store may have slipped in; the message says which gave which.

Wrong:
    export SEXPGPU_DATA_AWS_ACCESS_KEY_ID=…        (and the secret key of another store in AWS_SECRET_ACCESS_KEY)

Right:
    export SEXPGPU_DATA_AWS_ACCESS_KEY_ID=… SEXPGPU_DATA_AWS_SECRET_ACCESS_KEY=…
""",
    ),
    "E-NET-013": Entry(
        "no such bucket",
        """\
The server that was asked has no bucket of that name.

Why: Nothing is created unasked, and a bucket that is missing is not taken for one without checkpoints: a run would start anew.

Wrong:
    --checkpoint-dir s3://chekpoints/run

Right:
    --checkpoint-dir s3://checkpoints/run
""",
    ),
    "E-NET-014": Entry(
        "clock refused by S3",
        """\
The server refuses a request because this machine's clock differs from its own by too much.

Why: A signature holds the time, and servers take it only for some minutes.

Wrong:
    a machine whose clock was never set

Right:
    timedatectl set-ntp true
""",
    ),
    "E-NET-015": Entry(
        "wrong region",
        """\
The bucket lies in another region than the one that is set.

Why: The signature names the region. It is not looked up elsewhere, because data should not cross regions without being asked to.

Wrong:
    export AWS_REGION=us-east-1

Right:
    export AWS_REGION=eu-west-1
""",
    ),
    "E-NET-016": Entry(
        "endpoint not understood",
        """\
The endpoint of S3 is no `http` or `https` address of a server: the scheme is missing, or it holds a user, a query or a fragment.

Why: Keys have variables of their own; in an address they would be printed.

Wrong:
    export AWS_ENDPOINT_URL=storage.example

Right:
    export AWS_ENDPOINT_URL=https://storage.example
""",
    ),
    "E-NET-017": Entry(
        "plain http to another machine",
        """\
The endpoint begins with `http://` and is not this machine.

Why: Data and checkpoints would cross the network readable, and could be changed on the way.

Wrong:
    export AWS_ENDPOINT_URL=http://minio:9000

Right:
    export AWS_ENDPOINT_URL=http://minio:9000 SEXPGPU_PLAIN_HTTP=minio
""",
    ),
    "E-NET-018": Entry(
        "S3 does not allow it",
        """\
The key is known, and may not do what was asked.

Why: The data role reads objects; the checkpoint role lists, reads, writes and deletes them.

Wrong:
    a key for reading in SEXPGPU_CHECKPOINT_AWS_ACCESS_KEY_ID

Right:
    a key for reading in SEXPGPU_DATA_AWS_ACCESS_KEY_ID
""",
    ),
    "E-NET-019": Entry(
        "no such object",
        """\
The bucket is there, and nothing of that name is in it.

Why: Names on S3 are exact: case and slashes count.

Wrong:
    (csv "s3://bucket/Digits.csv" …)

Right:
    (csv "s3://bucket/digits.csv" …)
""",
    ),
    "E-NET-020": Entry(
        "request refused by the store",
        """\
The server answered with an error that has no page of its own, or in a way that S3 does not know, or boto3 could not send the request.

Why: Servers differ in what they offer; range reads, listings and uploads in parts are needed.

Wrong:
    a server that ignores the range of a read

Right:
    a server that speaks S3
""",
    ),
    "E-NET-021": Entry(
        "object changed while read",
        """\
An object was replaced by another between two reads of it.

Why: Half of one version and half of another is nobody's data.

Wrong:
    writing s3://bucket/data.csv while a run reads it

Right:
    a new name for new data: s3://bucket/data-2.csv
""",
    ),
    "E-NET-022": Entry(
        "S3 location not understood",
        """\
A location on S3 names no bucket, or no object where one is needed, or has `.` or `..` in it.

Why: `s3://bucket/prefix` is a place, `s3://bucket/path/to/file` an object; S3 has no relative paths.

Wrong:
    --checkpoint-dir s3:///run

Right:
    --checkpoint-dir s3://bucket/run
""",
    ),
    "E-NET-023": Entry(
        "another writer was first",
        """\
Something was to be written only if nothing was there, or only over a certain version, and another process had written it.

Why: So two runs that write to one place notice each other before one overwrites what the other wrote.

Wrong:
    two runs with --checkpoint-dir s3://bucket/run

Right:
    --checkpoint-dir 's3://bucket/{slug}'
""",
    ),
    "E-NET-024": Entry(
        "local storage failed",
        """\
A file or folder could not be read or written; the message gives the system's reason.

Why: The disk may be full, read-only, over its quota or gone.

Wrong:
    --checkpoint-dir /mnt/full/run

Right:
    --checkpoint-dir /mnt/large/run
""",
    ),
    "E-NET-040": Entry(
        "no key for the metrics service",
        """\
The target `syvain` needs SYVAIN_METRICS_API_KEY, and it is not set, blank, or no key.

Why: The service shows an organization's numbers to that organization. Blanks around the key are left out; one within it
is a copying mistake. The key is never printed.

Wrong:
    sexpgpu run a.lisp --metrics syvain

Right:
    SYVAIN_METRICS_API_KEY=ak_org_… sexpgpu run a.lisp --metrics syvain
""",
    ),
    "E-NET-041": Entry(
        "key not accepted",
        """\
The metrics service answered 401 or 403 to the key.

Why: The key was revoked, is of another organization's service, or was cut when it was copied. It is asked before the first
step, so that no run ends without its numbers.

Wrong:
    SYVAIN_METRICS_API_KEY=ak_org_old…

Right:
    SYVAIN_METRICS_API_KEY=ak_org_new…
""",
    ),
    "E-NET-042": Entry(
        "no such metrics folder",
        """\
The folder of the target `syvain` is not in the organization's tree, or its id is none.

Why: Its id is in the folder's address; `syvain:<id>` wins over SYVAIN_METRICS_FOLDER_ID.

Wrong:
    --metrics syvain:runs

Right:
    --metrics syvain:019e0000-0000-7000-8000-0000000000f0
""",
    ),
    "E-NET-043": Entry(
        "metrics service not reached",
        """\
No connection to the metrics service came about.

Why: The name, the network, a proxy or the certificate. The key is checked before the first step; after it no outage stops a run.

Wrong:
    --metrics syvain, on a machine without network

Right:
    --metrics jsonl:m.jsonl, and where there is network: sexpgpu metrics push m.jsonl
""",
    ),
    "E-NET-044": Entry(
        "metrics service too slow",
        """\
The metrics service was reached and did not answer well in the 25 seconds that a run's start may take.

Why: It is busy or in trouble: no answer in time, an answer that makes no sense, or a status of 429 or 5xx.

Wrong:
    --metrics syvain, while the service is down

Right:
    --metrics jsonl:m.jsonl, and later: sexpgpu metrics push m.jsonl
""",
    ),
    "E-NET-045": Entry(
        "not the metrics service",
        """\
The host answers, but not as the metrics service does.

Why: SYVAIN_METRICS_HOST names another machine, or a proxy answers in its stead.

Wrong:
    SYVAIN_METRICS_HOST=https://example.org

Right:
    SYVAIN_METRICS_HOST=https://metrics.041.io
""",
    ),
    "E-NET-046": Entry(
        "not all metrics delivered",
        """\
`sexpgpu metrics push` ended before every record had arrived.

Why: The service did not answer, or refused them. The file is as it was; what has arrived is remembered beside it, in
`<file>.sent`.

Wrong:
    deleting the file

Right:
    sexpgpu metrics push m.jsonl, again when the service is back
""",
    ),
    "E-NET-030": Entry(
        "nodes did not meet",
        """\
The machines of one run meet at SEXPGPU_RENDEZVOUS, an address of node 0, and not all of them came within the time limit; or node 0
could not listen there, or something else listens there. Ranks also reach each other at ports that the system chooses: where a firewall
lets the rendezvous' port alone through, a rank does not reach rank 0.

Why: Five minutes are waited, `--deadline rendezvous=30m` makes it longer. Nothing was computed yet.

Wrong:
    SEXPGPU_RENDEZVOUS=10.0.0.2:29500        (on node 0, whose address is 10.0.0.1)

Right:
    SEXPGPU_RENDEZVOUS=10.0.0.1:29500        (on every node)
""",
    ),
    "E-NET-031": Entry(
        "nodes differ",
        """\
The ranks of a run would not train the same: a file, the graph, a knob, a version, the data or the number of devices is another on one
of the nodes. The message names the node and what differs.

Why: Training would go on without an error and give numbers that nobody can make again.

Wrong:
    sexpgpu run a.lisp --set lr=0.1        (on node 0; without --set on node 1)

Right:
    sexpgpu run a.lisp --set lr=0.1        (on both)
""",
    ),
    "E-NET-032": Entry(
        "clocks differ",
        """\
`sexpgpu doctor --distributed` found that the clocks of two machines of a run differ by more than two seconds.

Why: Status files and metrics hold times, and S3 refuses requests of a clock that is minutes off.

Wrong:
    a machine whose clock was never set

Right:
    timedatectl set-ntp true
""",
    ),
    "E-NET-033": Entry(
        "clock differs from a server's",
        """\
`sexpgpu doctor` compared this machine's clock with the date that the servers of the settings give: the S3 endpoints and the metrics
service. They are more than 30 seconds apart; above five minutes it counts as an error.

Why: S3 refuses requests that were signed minutes before or after its own time (E-NET-014), and slugs, status files and metrics hold times.

Wrong:
    a machine whose clock was never set

Right:
    timedatectl set-ntp true
""",
    ),
}
