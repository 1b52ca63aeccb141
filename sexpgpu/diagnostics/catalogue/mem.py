"""Codes E-MEM-…: title and page of each. A code is never reused."""

from sexpgpu.diagnostics.core import Entry

CODES: dict[str, Entry] = {
    "E-MEM-001": Entry(
        "memory ran out",
        """The machine refused memory to the process. On the CPU a step needs the parameters, their gradients, the
optimizer's state and the activations of one micro-batch at once. A smaller `:batch`, or the same batch cut by
`:accumulate`, needs less; so does a smaller model. `sexpgpu explain FILE` counts the values of the parameters.

Wrong:
    :data (batches d :batch 4000000)

Right:
    :data (batches d :batch 4000) :accumulate 4
""",
    ),
    "E-MEM-002": Entry(
        "more than the device's memory",
        """The program was planned before its first step, and the plan is larger than the memory of the GPU that is free, or, on any
device, than `SEXPGPU_MEMORY`. The message says what each part takes, names the largest tensors by the layer that makes them, the
largest batch that would fit, and what `:accumulate` or `:remat true` would take. Parameters, gradients and the optimizer's state do not
depend on the batch; activations do.

Wrong:
    :data (batches d :batch 512)

Right:
    :data (batches d :batch 512) :accumulate 8
""",
    ),
    "E-MEM-003": Entry(
        "the device ran out of memory",
        """The device refused memory to a program whose plan had fit: another process took it meanwhile, or a library
needs more than was planned for. The message has the plan and the other processes on the device. Steps that were made are not
lost where a checkpoint location is given.

Wrong:
    sexpgpu run model.lisp --device cuda   # beside another run on the same GPU

Right:
    SEXPGPU_DEVICES=1 sexpgpu run model.lisp --device cuda
""",
    ),
}
