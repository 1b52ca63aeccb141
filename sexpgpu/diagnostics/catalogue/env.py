"""Codes E-ENV-…: title and page of each. A code is never reused."""

from sexpgpu.diagnostics.catalogue.page import page
from sexpgpu.diagnostics.core import Entry

CODES: dict[str, Entry] = {
    "E-ENV-001": Entry(
        "setting not understood",
        """A variable or flag holds text that it does not take. The message shows the text and says what would do.
Whole numbers are decimal digits: no sign, no blank, no `1e6`. A variable set to the empty string counts as unset.

`sexpgpu doctor` lists every setting, its value and where the value came from.""",
    ),
    "E-ENV-003": Entry(
        "setting needs another one",
        """Two settings belong together and one is missing. `--resume latest` searches the checkpoint location, so it
needs `--checkpoint-dir` or `SEXPGPU_CHECKPOINT_DIR`; a machine's rank needs the number of machines; `--metrics syvain` needs
`SYVAIN_METRICS_API_KEY`.""",
    ),
    "E-ENV-005": Entry(
        "unknown metrics target",
        r"""`--metrics` and `SEXPGPU_METRICS` take `jsonl:<path>`, `stdout`, `syvain` and `syvain:<folder-id>`, several
divided by commas. A comma that belongs to a path is written `\,`. Without a target no metrics are written.""",
    ),
    "E-ENV-006": Entry(
        "command line not understood",
        """There is no such command or option, or one lacks its value. `sexpgpu --help` lists the commands and
`sexpgpu <command> --help` the options of one.""",
    ),
    "E-ENV-007": Entry(
        "no such code",
        """`sexpgpu explain` was given an error code that does not exist. Codes look like `E-SHAPE-003`, and
`docs/errors.md` lists all of them. To explain an experiment, give the path of its file.""",
    ),
    "E-ENV-010": Entry(
        "unknown variable",
        """A warning: a variable begins with `SEXPGPU_` or `FLASHCART_` and is none that SexpGPU reads, so it has no
effect. Most often it is a misspelling; the message names the nearest variable there is.""",
    ),
    "E-ENV-012": Entry(
        "no space left",
        """What a command prints could not be written, because the disk that its output goes to is full. Free some space,
or send the output elsewhere.""",
    ),
    "E-ENV-011": Entry(
        "package missing",
        """`sexpgpu doctor` did not find a package that SexpGPU needs. Installing SexpGPU with pip brings all of them; a
package goes missing when it was removed afterwards, or when another Python than that one is running.""",
    ),
    "E-ENV-016": Entry(
        "word that counts as off",
        """A warning: a variable that is on or off holds another word. `1`, `true`, `yes` and `t` are on, in any case; every other
text is off, as FlashCart has it. `on` is one of those, so the message says what the word did.""",
    ),
    "E-ENV-014": Entry(
        "optional package missing",
        """A command needs a package that an installation of SexpGPU alone does not bring. `sexpgpu plot` draws with
matplotlib: `pip install 'sexpgpu[plot]'`.""",
    ),
    "E-ENV-015": Entry(
        "torchrun and our variables",
        """torchrun starts a process a rank and says by its variables who takes part. SEXPGPU_NODES, SEXPGPU_NODE_RANK and
SEXPGPU_RENDEZVOUS say the same, so that one of the two has to go; and torchrun's own variables must fit together.""",
    ),
    "E-ENV-020": Entry(
        "check that did not end",
        """A check of `sexpgpu doctor` took longer than it may and was left. What it reads hangs (a disk over a network, a server that
takes a request and says nothing, a pipe that nobody writes), or, of `--numerics`, the file is too large for an interpreter.""",
    ),
    "E-ENV-021": Entry(
        "memory or disk nearly full",
        """A warning of `sexpgpu doctor`: less than 400 MiB of memory is free, of which torch alone takes most, or less than 64 MiB of a
disk that a run writes to: temporary files, parsed data, checkpoints.""",
    ),
    "E-ENV-022": Entry(
        "cache with entries of no use",
        """A warning of `sexpgpu doctor`: entries of a cache are cut, changed by someone, or were left half written by a process that was
killed more than a day ago. A run notices them and makes them anew, so nothing is wrong but the room they take; where they come
back, look at the disk.""",
    ),
}

EXAMPLES: dict[str, tuple[str, str]] = {
    "E-ENV-020": ("sexpgpu doctor train.lisp --numerics   # a model of a GB, no GPU", "sexpgpu doctor train.lisp --numerics --set width=64"),
    "E-ENV-021": ("sexpgpu doctor   # with TMPDIR on a full disk", "TMPDIR=/mnt/large sexpgpu doctor"),
    "E-ENV-022": ("kill -9 of a run that parses data; sexpgpu doctor a day later", "rm -r ~/.cache/sexpgpu/data"),
    "E-ENV-014": ("pip install sexpgpu\nsexpgpu plot run.jsonl", "pip install 'sexpgpu[plot]'\nsexpgpu plot run.jsonl"),
    "E-ENV-015": ("SEXPGPU_NODES=2 torchrun --nnodes 2 … sexpgpu run a.lisp", "torchrun --nnodes 2 … sexpgpu run a.lisp"),
    "E-ENV-001": ("sexpgpu run digits.lisp --steps 1e3", "sexpgpu run digits.lisp --steps 1000"),
    "E-ENV-003": ("sexpgpu run digits.lisp --resume latest", "sexpgpu run digits.lisp --resume latest --checkpoint-dir runs/digits"),
    "E-ENV-005": ("--metrics json:m.jsonl", "--metrics jsonl:m.jsonl"),
    "E-ENV-006": ("sexpgpu run digits.lisp --devise cpu", "sexpgpu run digits.lisp --device cpu"),
    "E-ENV-007": ("sexpgpu explain E-SHAPE-999", "sexpgpu explain E-SHAPE-009"),
    "E-ENV-016": ("FLASHCART_TP_PEAK_AWARE_GROUPS=on sexpgpu doctor", "FLASHCART_TP_PEAK_AWARE_GROUPS=true sexpgpu doctor"),
    "E-ENV-010": ("SEXPGPU_Metrics=stdout sexpgpu run digits.lisp", "SEXPGPU_METRICS=stdout sexpgpu run digits.lisp"),
    "E-ENV-011": ("pip uninstall lark", "pip install sexpgpu"),
    "E-ENV-012": ("sexpgpu explain digits.lisp > /a/full/disk.txt", "sexpgpu explain digits.lisp > elsewhere.txt"),
}
CODES |= {code: Entry(CODES[code].title, page(CODES[code].page, *EXAMPLES[code])) for code in EXAMPLES}
