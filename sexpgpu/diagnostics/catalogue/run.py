"""Codes E-RUN-…: title and page of each. A code is never reused."""

from sexpgpu.diagnostics.catalogue.forms import RUN
from sexpgpu.diagnostics.core import Entry

CODES: dict[str, Entry] = {
    "E-RUN-001": Entry(
        "not finite",
        """\
The loss or the norm of its gradient became infinite or NaN.

Why: The step is not applied, so the weights and the last checkpoint are still good. The notes name the first op that made
a number which is not finite, with its operands and samples; `sexpgpu autopsy` shows it again.

Wrong:
    :optimizer (adamw :lr 10.0)

Right:
    :optimizer (adamw :lr 1e-3)   ; or :clip-norm 1.0
""",
    ),
    "E-RUN-002": Entry(
        "not a length of time",
        """\
`--max-time` takes hours, minutes and seconds with their letters.

Why: A bare number could mean any of them.

Wrong:
    --max-time 90

Right:
    --max-time 90m
""",
    ),
    "E-RUN-003": Entry(
        "no place for a checkpoint",
        """\
SIGUSR1 asks for a checkpoint, but the run has no location.

Why: The run goes on; nothing was saved.

Wrong:
    sexpgpu run digits.lisp &  kill -USR1 $!

Right:
    sexpgpu run digits.lisp --checkpoint-dir checkpoints
""",
    ),
    "E-RUN-011": Entry(
        "unknown metrics target",
        """\
`--metrics` or SEXPGPU_METRICS names something that is no target.

Why: Targets are jsonl:<path> and stdout, several by comma.

Wrong:
    --metrics json:m.jsonl

Right:
    --metrics jsonl:m.jsonl
""",
    ),
    "E-RUN-012": Entry(
        "metrics target named twice",
        """\
One target is given twice.

Why: Every record would be written twice.

Wrong:
    --metrics jsonl:m.jsonl,jsonl:m.jsonl

Right:
    --metrics jsonl:m.jsonl,stdout
""",
    ),
    "E-RUN-013": Entry(
        "metrics file not usable",
        """\
The file cannot be opened, or is there and holds something else than metrics.

Why: It is found before the first step, and nothing of the file is changed.

Wrong:
    --metrics jsonl:notes.txt

Right:
    --metrics jsonl:metrics.jsonl
""",
    ),
    "E-RUN-014": Entry(
        "metrics file in use",
        """\
A run that is still alive writes to this file.

Why: One file has one writer.

Wrong:
    two runs with jsonl:m.jsonl at once

Right:
    one file each
""",
    ),
    "E-RUN-015": Entry(
        "metrics file not readable",
        """\
`plot` or `metrics push` was given a file that is not there or holds no records.

Why: They read what a run wrote with `--metrics jsonl:<path>`, or the spool that a run named at its end.

Wrong:
    sexpgpu plot run.log

Right:
    sexpgpu plot metrics.jsonl
""",
    ),
    "E-RUN-016": Entry(
        "nothing to plot",
        """\
The runs of the files have no metrics that could be drawn.

Why: A run writes its first numbers at the first step that `:log-every` divides.

Wrong:
    a run that failed before its first logged step

Right:
    one that logged at least one step
""",
    ),
    "E-RUN-020": Entry(
        "status file not writable",
        """\
The status file cannot be written.

Why: It is found before the first step.

Wrong:
    --status /no/such/folder/status.json

Right:
    --status status.json
""",
    ),
    "E-RUN-021": Entry(
        "no status to show",
        """\
`sexpgpu status` was given a path that is not there or is no status file.

Why: It shows what a run writes with `--status <path>`, or SEXPGPU_STATUS.

Wrong:
    sexpgpu status metrics.jsonl

Right:
    sexpgpu status status.json
""",
    ),
    "E-RUN-031": Entry(
        "index out of range",
        """\
An op was given an index, computed in the step, that names no element.

Why: An index is checked where it is used. A label or token that comes straight from a field is checked before the first
step; one that the program computes can only be seen when the step runs. Negative indices do not count from the end.

Wrong:
    (embed table (+ tokens 1))              ; 255 + 1, of a table of 256 rows

Right:
    (embed table (clamp (+ tokens 1) :low 0 :high 255))
""",
    ),
    "E-RUN-050": Entry(
        "argument of a Python call",
        """\
A module of `sexpgpu.load` got an argument that its function cannot take.

Why: Tensors are inputs of the graph: on the CPU, of the precision's float type, or of an integer type. Numbers,
strings, None and lists of them are known when the graph is made. Nothing else has a meaning in the language.

Wrong:
    model.perceptron(image.half())

Right:
    model.perceptron(image.float())
""",
    ),
    "E-RUN-051": Entry(
        "value of a Python call",
        """\
A function called from Python returned what Python has no word for.

Why: Tensors, numbers, strings and lists of them come back; a function, a symbol or a macro does not.

Wrong:
    (defun choose (x) relu)

Right:
    (defun choose (x) (relu x))
""",
    ),
    "E-RUN-052": Entry(
        "parameter was changed",
        """\
A parameter of a loaded model has another dtype, shape or device than the program.

Why: The graph is compiled for the run's precision on the CPU; `model.double()` or `model.cuda()` change the tensors and
not the graph.

Wrong:
    model = sexpgpu.load("digits.lisp").double()

Right:
    model = sexpgpu.load("digits.lisp", set={"precision": "f64"})
""",
    ),
    "E-RUN-053": Entry(
        "index out of range",
        """\
An integer tensor given to a module names a row or a class that is not there.

Why: Rows and classes count from 0, and the last is one less than their number.

Wrong:
    model.loss(image, torch.tensor([10]))   # of 10 classes

Right:
    model.loss(image, torch.tensor([9]))
""",
    ),
    "E-RUN-054": Entry(
        "argument of load",
        """\
`sexpgpu.load` got an argument of another kind.

Why: `set` is a mapping of knobs, or a list of `name=value`; `weights` is "raw" or "ema".

Wrong:
    sexpgpu.load("digits.lisp", set="lr=1e-3")

Right:
    sexpgpu.load("digits.lisp", set={"lr": 1e-3})
""",
    ),
    "E-RUN-055": Entry(
        "a calculator that cannot be",
        """\
`sexpgpu.ase.Calculator` needs a run that trains on atomic structures, and a function of their fields that returns energies
and forces. The message says what is missing.

Why: The calculator knows atoms, a cell and elements, no labels; everything else is the file's.

Wrong:
    (defun energy-forces (positions energy) …)      ; atoms have no energy to give

Right:
    (defun energy-forces (positions offsets species senders receivers graph graph-mask) …)
""",
    ),
    "E-RUN-056": Entry(
        "potential breaks a law",
        """\
`sexpgpu doctor FILE` tried the file's potential on random structures. Its energy, forces or stress change where they may not: under
a rotation, a reflection, a translation or another order of the atoms; or the forces are not the energy's derivative.

Why: A potential that knows a direction or a place in space gives trajectories that heat up or drift.

Wrong:
    (+ (vector-lengths vectors) (slice vectors :axis 1 :stop 1))    ; the x component: a direction

Right:
    (vector-lengths vectors)
""",
    ),
    "E-RUN-057": Entry(
        "atoms that have no energy",
        """\
A potential was asked about atoms that no structure has: a position that is not finite, two atoms at one place, periodic directions without a cell; or what it
gives is not finite. Atoms are counted from 0, as ASE does.

Why: Two atoms at one place have no direction between them, so the force on them is not a number, and a trajectory would go on with it.

Wrong:
    Atoms("H2")                          ; both at the origin

Right:
    Atoms("H2", [[0, 0, 0], [0, 0, 0.74]])
""",
    ),
    "E-RUN-080": Entry(
        "a command of the prompt that cannot be",
        """\
At the prompt of `sexpgpu repl`, an input that begins with a comma is a command; `,help` lists them with what they take.

Why: The message says which command is meant, or what it lacks: a file, a form, a number, a run.

Wrong:
    ,run ten

Right:
    ,load examples/digits.lisp
    ,run 10
""",
    ),
    "E-RUN-081": Entry(
        "a tensor without a value",
        """\
At the prompt a tensor is computed at once, so each leaf of its graph needs a value.

Why: Literals, parameters and states have one. A statistic of data or an optimizer's slot gets its value from a run.

Wrong:
    (statistic data "scale" 1)

Right:
    (array 0.5)
""",
    ),
    "E-RUN-082": Entry(
        "nothing there to explain",
        """\
`sexpgpu explain FILE --why PATH` takes the path of a parameter or state of the run, or the end of one that no other has;
`sexpgpu explain FILE:LINE` takes a line that the file has.

Why: `sexpgpu explain FILE` lists the paths. A number in a path counts calls, and a call that is alone has none.

Wrong:
    sexpgpu explain examples/digits.lisp --why perceptron/hidden

Right:
    sexpgpu explain examples/digits.lisp --why perceptron/in/weight
""",
    ),
    "E-RUN-040": Entry(
        "no reproducer there",
        """\
`sexpgpu autopsy` takes the folder that a run left when a step was not finite.

Why: The folder holds the program, its knobs and parameters; without them there is nothing to replay.

Wrong:
    sexpgpu autopsy digits.lisp

Right:
    sexpgpu autopsy runs/digits-20260101-120000-abcd-not-finite-step-17
""",
    ),
    "E-RUN-060": Entry(
        "a rank ended",
        """\
A run has one process a device, its ranks, and one of them ended before the run did; the others were ended too.

Why: The others would wait for it for ever. SIGKILL is also what the system sends when memory runs out.

Wrong:
    two ranks on a machine that has memory for one

Right:
    a smaller :batch, or :shard optimizer in the run; then go on with --resume latest
""",
    ),
    "E-RUN-061": Entry(
        "a rank is silent",
        """\
Every rank says once a second that it is there, whatever it does. Nothing was heard from one of them for too long, so the run was ended.

Why: A paused process, a machine that hangs or a link that is down looks the same to the others: they wait. `--deadline silent=1m`
makes it longer than 15 s.

Wrong:
    kill -STOP of one rank

Right:
    sexpgpu run a.lisp --resume latest --checkpoint-dir runs/a        (when the machine is back)
""",
    ),
    "E-RUN-062": Entry(
        "a rank makes the others wait",
        """\
A rank is there, but did nothing new in its phase while others waited for it, for longer than that phase allows.

Why: A disk or a server that does not answer looks like this. The message has the rank's stack: where it waits.

Wrong:
    data on a network drive that hangs

Right:
    --deadline running=10m        (if it is only slow)
""",
    ),
    "E-RUN-063": Entry(
        "ranks lost each other",
        """\
The ranks' processes live, but what they compute together does not get through.

Why: The links between the ranks are others than that to node 0: ranks speak at ports that the system chooses.

Wrong:
    a firewall between the machines that lets SEXPGPU_RENDEZVOUS through and no other port

Right:
    a private network on which the machines of the run reach each other at every port
""",
    ),
    "E-RUN-064": Entry(
        "deadline not understood",
        """\
`--deadline` takes a phase and a length of time.

Why: The phases are rendezvous, silent, starting, compiling, running, evaluating, saving and autopsy.

Wrong:
    --deadline 5m

Right:
    --deadline running=5m
""",
    ),
    "W-RUN-005": Entry(
        "status file of two runs",
        """\
Another run that is alive writes the same status file. Each replaces what the other said.

Why: A status file says how one run stands, and whoever reads it cannot tell the two apart but by their pid.

Wrong:
    two runs at once with SEXPGPU_STATUS=status.json

Right:
    sexpgpu run a.lisp --status a.json & sexpgpu run b.lisp --status b.json
""",
    ),
    "W-RUN-004": Entry(
        "samples taken together",
        """\
Something in the model takes the samples of a batch together, such as batch norm, and the batch is cut into micro-batches, of ranks or of
`:accumulate`. It sees each of them alone.

Why: Losses and metrics are of the whole batch however it is cut; what such a layer computes is not.

Wrong:
    comparing a run on 1 device with one on 8, to the last digit, with batch norm in the model

Right:
    layer norm or group norm, which take each sample alone; or one number of ranks times :accumulate for all runs that are compared
""",
    ),
}

CODES |= RUN
