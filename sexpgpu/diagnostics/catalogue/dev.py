"""Codes E-DEV-…: title and page of each. A code is never reused."""

from sexpgpu.diagnostics.catalogue.page import page
from sexpgpu.diagnostics.core import Entry

CODES: dict[str, Entry] = {
    "E-DEV-001": Entry("torch without CUDA", page(
        "The device `cuda` needs a torch that is built for CUDA. The installed one is for the CPU alone.",
        "pip install torch   # from an index of CPU builds\nsexpgpu run digits.lisp --device cuda",
        "pip install --force-reinstall torch   # from an index of CUDA builds\nsexpgpu run digits.lisp --device cuda",
        "Compiled kernels are launched through torch's CUDA runtime. `explain --device cuda` needs none: it lowers without a GPU.")),
    "E-DEV-002": Entry("no GPU visible", page(
        "The driver shows this process no GPU: there is none, the driver is not loaded, a container was started without it, or "
        "`CUDA_VISIBLE_DEVICES` hides it.",
        "CUDA_VISIBLE_DEVICES= sexpgpu run digits.lisp --device cuda",
        "CUDA_VISIBLE_DEVICES=0 sexpgpu run digits.lisp --device cuda",
        "`nvidia-smi` lists what the driver sees. A container needs `--gpus all`.")),
    "E-DEV-003": Entry("driver too old", page(
        "The NVIDIA driver is older than the CUDA version that torch is built for. The message names both.",
        "sexpgpu run digits.lisp --device cuda   # a driver of CUDA 11, a torch of CUDA 12",
        "pip install --force-reinstall torch   # a build for the driver's CUDA version\nsexpgpu run digits.lisp --device cuda",
        "A newer driver runs older CUDA versions, an older driver no newer ones. Updating the driver mends it too.")),
    "E-DEV-004": Entry("no such GPU", page(
        "`SEXPGPU_DEVICES` names a GPU that is not there. GPUs are numbered from 0, after `CUDA_VISIBLE_DEVICES`.",
        "CUDA_VISIBLE_DEVICES=3 SEXPGPU_DEVICES=3 sexpgpu run digits.lisp --device cuda",
        "CUDA_VISIBLE_DEVICES=3 SEXPGPU_DEVICES=0 sexpgpu run digits.lisp --device cuda",
        "With `CUDA_VISIBLE_DEVICES=3` the process sees one GPU, and that is number 0.")),
    "E-DEV-005": Entry("which GPU", page(
        "Several GPUs are visible and nothing says which ones to take. `SEXPGPU_DEVICES=0` takes one, `SEXPGPU_DEVICES=0,1` trains on two.",
        "sexpgpu run digits.lisp --device cuda   # on a machine with 8 GPUs",
        "SEXPGPU_DEVICES=0 sexpgpu run digits.lisp --device cuda",
        "Taking the first one silently would put the runs of two people on the same GPU.")),
    "E-DEV-006": Entry("op without lowering", page(
        "The program has an op that the CUDA backend has no kernel or library call of, at this dtype. The message names the op and "
        "where it is made.",
        "sexpgpu run model.lisp --device cuda",
        "sexpgpu run model.lisp --device cpu",
        "The interpreter runs every op. Please report which op it was.")),
    "E-DEV-007": Entry("kernel cache not used", page(
        "A warning: compiled kernels cannot be kept, because the cache's folder cannot be written, belongs to another user, or can "
        "be written by others. The run goes on, with a temporary folder; the next start compiles again.",
        "XDG_CACHE_HOME=/read-only sexpgpu run digits.lisp --device cuda",
        "XDG_CACHE_HOME=$HOME/.cache sexpgpu run digits.lisp --device cuda",
        "A cache that others may write to could hand this process their code.")),
    "E-DEV-009": Entry("atomic sums where runs shall repeat", page(
        "`FLASHCART_TP_SCATTER_KERNEL=edge` adds the edges of a tensor product in whatever order they come, so two runs differ in the last "
        "bits. The file states `:deterministic true`, and the two exclude each other.",
        "FLASHCART_TP_SCATTER_KERNEL=edge sexpgpu run potential.lisp --device cuda   # (defrun … :deterministic true)",
        "sexpgpu run potential.lisp --device cuda",
        "A run that does not state `:deterministic` takes `edge` and says that it is not bit-exact.")),
    "E-DEV-008": Entry("Triton missing", page(
        "Kernels for `cuda` are written in Triton, which is not installed. It comes with SexpGPU on Linux; there is none for other systems.",
        "pip uninstall triton\nsexpgpu run digits.lisp --device cuda",
        "pip install triton\nsexpgpu run digits.lisp --device cuda")),
    "E-DEV-010": Entry("kernel gives wrong numbers", page(
        "`sexpgpu doctor` ran a compiled kernel beside the interpreter, and the values are further apart than sums in another order explain. "
        "`doctor FILE --numerics` does it for every kernel of a file and names the first that is wrong, with its place.",
        "sexpgpu run model.lisp --device cuda   # although doctor found a wrong kernel",
        "sexpgpu doctor model.lisp --numerics\nsexpgpu run model.lisp --device cpu",
        "A GPU that is failing, a driver and a Triton that do not fit together, or a mistake of ours in a kernel: in each case a run would "
        "train on wrong numbers without a word.")),
    "E-DEV-011": Entry("kernels cannot be compiled", page(
        "The process in which `sexpgpu doctor` compiles kernels ended before it was through. The message repeats the last line that it said.",
        "sexpgpu doctor   # a Triton of another version than torch was built for",
        "pip install --force-reinstall sexpgpu\nsexpgpu doctor",
        "Most often torch, Triton and the driver are of versions that do not fit together.")),
    "E-DEV-012": Entry("vendor's products not reached", page(
        "A warning: cuBLASLt, which comes with torch, cannot be loaded or refuses a call, so torch computes the matrix products, and biases "
        "and GELU take passes of their own. The numbers are as good; the step is slower.",
        "pip uninstall nvidia-cublas\nsexpgpu run gpt2.lisp --device cuda",
        "pip install --force-reinstall torch\nsexpgpu run gpt2.lisp --device cuda",
        "Most often another version of the library is found than torch was built with; the message says what the library answered.")),
    "E-DEV-013": Entry("the device failed", page(
        "The GPU stopped in the middle of the run: it reported a fault of its own, was reset or taken away, or a kernel went wrong. The message "
        "has the driver's words and the steps that were under way; none of them is told or saved.",
        "sexpgpu run gpt2.lisp --device cuda   # without a checkpoint location: all steps are lost",
        "sexpgpu run gpt2.lisp --device cuda --checkpoint-dir runs/gpt2 --resume latest",
        "After such an error no call of the process reaches the device any more. An \"illegal memory access\" that comes again at the same step "
        "is a bug of ours: please report it.")),
}
