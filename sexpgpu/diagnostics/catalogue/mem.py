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
}
