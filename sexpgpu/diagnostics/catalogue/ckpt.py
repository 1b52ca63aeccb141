"""Codes E-CKPT-…: title and page of each. A code is never reused."""

from sexpgpu.diagnostics.core import Entry

CODES: dict[str, Entry] = {
    "E-CKPT-001": Entry(
        "no checkpoint there",
        """\
`--resume` names a path that is no checkpoint.

Why: A checkpoint is a folder step-<n> with a manifest.json; a location holds several.

Wrong:
    --resume checkpoints

Right:
    --resume checkpoints/step-100
    --resume latest --checkpoint-dir checkpoints
""",
    ),
    "E-CKPT-002": Entry(
        "checkpoint not whole",
        """\
A file of the checkpoint is missing, cut or changed.

Why: Sizes and SHA-256 of the manifest do not agree with the files, so nothing of it is used.

Wrong:
    --resume checkpoints/step-100   # its file was cut

Right:
    --resume latest --checkpoint-dir checkpoints
""",
    ),
    "E-CKPT-003": Entry(
        "unknown checkpoint format",
        """\
The manifest has a format number that this version does not know.

Why: A newer version wrote it.

Wrong:
    an old sexpgpu with a new checkpoint

Right:
    the version that wrote it
""",
    ),
    "E-CKPT-004": Entry(
        "latest of what?",
        """\
`--resume latest` needs a checkpoint location.

Why: The newest checkpoint is looked for there and nowhere else.

Wrong:
    --resume latest

Right:
    --resume latest --checkpoint-dir checkpoints
""",
    ),
    "E-CKPT-005": Entry(
        "location not readable",
        """\
The checkpoint location cannot be listed.

Why: Starting anew when checkpoints may be there would hide them.

Wrong:
    a folder without read permission

Right:
    chmod u+rx checkpoints
""",
    ),
    "E-CKPT-006": Entry(
        "only suspect checkpoints",
        """\
Every whole checkpoint of the location holds a number that is not finite.

Why: Going on from one would most likely fail at once.

Wrong:
    --resume latest

Right:
    --resume checkpoints/step-100   # if you know why it is so
""",
    ),
    "E-CKPT-007": Entry(
        "location of another run",
        """\
The location holds checkpoints of another run.

Why: Two runs in one location would overwrite each other.

Wrong:
    --checkpoint-dir checkpoints   # twice

Right:
    --checkpoint-dir 'checkpoints/{slug}'
    --checkpoint-dir checkpoints --resume latest
""",
    ),
    "E-CKPT-009": Entry(
        "newer checkpoints exist",
        """\
The location has newer checkpoints than the one to resume from.

Why: Steps would be made twice with different numbers in one history.

Wrong:
    --resume a/step-10 --checkpoint-dir a   # there is a/step-20

Right:
    --resume latest --checkpoint-dir a
    --resume a/step-10 --checkpoint-dir b   # a fork, a run of its own
    --resume a/step-10   # saves nothing
""",
    ),
    "E-CKPT-010": Entry(
        "location not writable",
        """\
The checkpoint location cannot be made or written.

Why: It is found before the first step rather than after the last.

Wrong:
    --checkpoint-dir /system/x

Right:
    --checkpoint-dir checkpoints
""",
    ),
    "E-CKPT-011": Entry(
        "location in use",
        """\
A run that is still alive writes to this location.

Why: One location has one writer.

Wrong:
    two runs with --checkpoint-dir checkpoints at once

Right:
    --checkpoint-dir 'checkpoints/{slug}'
""",
    ),
    "E-CKPT-012": Entry(
        "checkpoint not written",
        """\
Writing a checkpoint failed: a full disk or quota, one that became read-only, a limit on the size of files, a store out of reach.

Why: The older checkpoints are as they were. In the middle of a run this is a warning and the next one is tried; at its
end, or when a signal ends it, it is exit code 3. The message says what mends it, then --resume latest goes on.

Wrong:
    a full disk

Right:
    room on it, or fewer kept: :keep 1
    another place: --checkpoint-dir /larger/disk
""",
    ),
    "E-CKPT-020": Entry(
        "checkpoint of another program",
        """\
Names, shapes or types of tensors differ, or the run's name.

Why: The weights have no place in this program.

Wrong:
    resume after hidden was changed from 128 to 256

Right:
    --set hidden=128, or a new location
""",
    ),
    "E-CKPT-021": Entry(
        "the trajectory would change",
        """\
The checkpoint fits, but graph, data, optimizer, seed or the like differ from those that it was made with.

Why: The numbers after it would not be those of the run it belongs to; that may be wanted, but must be said.

Wrong:
    --resume latest --set lr=1e-4

Right:
    --resume latest --set lr=1e-4 --accept
""",
    ),
    "E-CKPT-030": Entry(
        "output would overwrite",
        """\
The file that an export or a prediction should write exists already.

Why: What was written once is not replaced by accident.

Wrong:
    sexpgpu export runs/digits/step-100 digits.safetensors   # twice

Right:
    sexpgpu export runs/digits/step-100 digits.safetensors --force
""",
    ),
    "E-CKPT-031": Entry(
        "output not written",
        """\
The file of an export or a prediction could not be written: no such folder, no permission, or a full disk.

Why: The file is whole or not there; one that was there before is as it was.

Wrong:
    sexpgpu export runs/digits/step-100 no-such-folder/digits.safetensors

Right:
    sexpgpu export runs/digits/step-100 digits.safetensors
""",
    ),
    "E-CKPT-032": Entry(
        "no checkpoint named",
        """\
The command uses trained weights, and neither `--resume` nor SEXPGPU_RESUME names a checkpoint.

Why: Without one it would use weights that were never trained.

Wrong:
    sexpgpu eval digits.lisp

Right:
    sexpgpu eval digits.lisp --resume runs/digits/step-100
    sexpgpu eval digits.lisp --resume latest --checkpoint-dir runs/digits
""",
    ),
    "E-CKPT-033": Entry(
        "nothing to evaluate",
        """\
The file has no evaluation, so a checkpoint cannot be evaluated with it.

Why: What is computed, and on which data, is said by a defeval.

Wrong:
    a file with a defrun only

Right:
    (defeval valid :data (batches digits :split valid :batch 128) :metrics ((loss digit-loss)))
""",
    ),
    "E-CKPT-034": Entry(
        "no such function",
        """\
The name given to `predict`, or taken of a model in Python, is no function of the file; or what a prediction's function returns is no tensor with one row for each row of the input.

Why: A prediction is computed in batches of rows, whose results are joined.

Wrong:
    sexpgpu predict digits.lisp hidden --resume runs/digits/step-100 --input x.npz --out y.npz   # a knob

Right:
    sexpgpu predict digits.lisp perceptron --resume runs/digits/step-100 --input x.npz --out y.npz
""",
    ),
    "E-CKPT-035": Entry(
        "input does not fit",
        """\
The input of `predict` is no npz file, lacks an array that the function takes, or has one of another shape or type.

Why: Arrays reach the function by the names of its parameters; axis 0 is the row.

Wrong:
    numpy.savez("x.npz", pictures=images)   # the function is (perceptron image)

Right:
    numpy.savez("x.npz", image=images)
""",
    ),
    "E-CKPT-036": Entry(
        "no averaged weights",
        """\
`--weights ema` asks for averaged weights, and the checkpoint has none.

Why: A run keeps moving averages only where it says `:ema`.

Wrong:
    sexpgpu export runs/digits/step-100 digits.safetensors --weights ema   # a run without :ema

Right:
    sexpgpu export runs/digits/step-100 digits.safetensors
""",
    ),
    "E-CKPT-040": Entry(
        "resume not proved",
        """\
`sexpgpu doctor FILE --resume` trained a few steps without a break, and again with a stop, a kill and two resumes; the two did not
end in the same bits, or one of these runs failed.

Why: A resume is exact to the last bit. Where it is not, a run that was preempted is another run.

Wrong:
    sexpgpu run train.lisp --checkpoint-dir runs   # where doctor says that a resume is another run

Right:
    sexpgpu doctor train.lisp --resume
""",
    ),
}
