"""What people who know PyTorch or NumPy type, and what one writes here: a help line of the "unknown name" message.

A table of names that the nearest spelling would explain badly. Where the right-hand side is a form, a test evaluates it.
"""

from __future__ import annotations

#: name, in lower case with `-` -> the form that does it; x and y are any tensors, z is [n c h w], i is integers
FORMS = {
    "adaptive-avg-pool": "(mean z :axis [2 3] :keep-dims true)",
    "adaptive-average-pool": "(mean z :axis [2 3] :keep-dims true)",
    "global-average-pool": "(mean z :axis [2 3])",
    "avg-pool": "(average-pool z 2)",
    "arange": "(iota 8)",
    "bce-with-logits": "(bce x y)",
    "binary-cross-entropy": "(bce x y)",
    "sigmoid-cross-entropy": "(bce x y)",
    "bmm": "(matmul x (transpose y))",
    "mm": "(matmul x (transpose y))",
    "chunk": "(slice x :axis 1 :start 0 :stop 3)",
    "split": "(slice x :axis 1 :start 0 :stop 3)",
    "clip": "(clamp x :low -1 :high 1)",
    "hardtanh": "(clamp x :low -1 :high 1)",
    "relu6": "(clamp x :low 0 :high 6)",
    "conv1d": "(convolution z 8 3 :padding 1)",
    "conv2d": "(convolution z 8 3 :padding 1)",
    "conv3d": "(convolution z 8 3 :padding 1)",
    "conv": "(convolution z 8 3 :padding 1)",
    "cross-entropy-loss": "(cross-entropy x i)",
    "nll-loss": "(cross-entropy x i)",
    "detach": "(stop-gradient x)",
    "no-grad": "(stop-gradient x)",
    "dot": "(sum (* x y) :axis -1)",
    "eye": "(one-hot (iota 3) 3)",
    "floor-divide": "(floor (/ x y))",
    "index-select": "(gather x i :axis 0)",
    "take": "(gather x i :axis 0)",
    "instance-norm": "(group-norm z (dim z 1))",
    "isfinite": "(is-finite x)",
    "isnan": "(is-nan x)",
    "l1-loss": "(mean-absolute-error x y)",
    "mae": "(mean-absolute-error x y)",
    "log-sigmoid": "(neg (softplus (neg x)))",
    "logsigmoid": "(neg (softplus (neg x)))",
    "masked-fill": "(where (> x 0) 0 x)",
    "maximum": "(max x y)",
    "minimum": "(min x y)",
    "mse-loss": "(mse x y)",
    "huber-loss": "(huber x y)",
    "multihead-attention": "(attention x :heads 2)",
    "scaled-dot-product-attention": "(attend x x x :causal true)",
    "nan-to-num": "(where (is-finite x) x 0)",
    "ndim": "(rank x)",
    "norm": "(sqrt (sum (* x x) :axis -1))",
    "numel": "(reduce * (shape x))",
    "outer": "(* (expand-dims x :axis -1) (expand-dims y :axis -2))",
    "permute": "(transpose x [1 0])",
    "prelu": '(leaky-relu x :slope 0.25)',
    "print": '(tap "mean" (mean x))',
    "rand": "(random-uniform x)",
    "randn": "(random-normal x)",
    "randn-like": "(random-normal x)",
    "repeat": "(concat [x x] :axis 0)",
    "tile": "(concat [x x] :axis 0)",
    "roll": "(concat [(slice x :axis 0 :start -1) (slice x :axis 0 :stop -1)] :axis 0)",
    "size": "(dim x 0)",
    "std": "(sqrt (variance x :axis -1))",
    "var": "(variance x :axis -1)",
    "swish": "(silu x)",
    "triu": "(- x (tril x :offset -1))",
    "unbind": "(mapcar (lambda (j) (squeeze (slice x :axis 0 :start j :stop (1+ j)) :axis 0)) (range (dim x 0)))",
    "unsqueeze": "(expand-dims x :axis 0)",
    "view": "(reshape x [2 -1])",
}
#: what has no form
WORDS = {
    **dict.fromkeys(("for", "loop", "while", "do"), "a loop is (dotimes (i 3) …), (mapcar function list) or (reduce function list)"),
    **dict.fromkeys(("full", "zeros-like", "ones-like"), "a number stands for a tensor of it: (where (> x 0) x 1)"),
    **dict.fromkeys(("backward", "autograd"), "a run differentiates its loss; in a program (grad y x) is a gradient"),
    **dict.fromkeys(("cuda", "device"), "a file has no devices: SEXPGPU_DEVICE chooses when it is run"),
    "set!": "(setq name value) changes a local variable",
    "sequential": "layers are functions: (linear (relu (linear x 8)) 2)",
    "module": "a layer of your own is (deflayer name (x) …)",
}


def written_here(name: str) -> str | None:
    """The help line for a name that other libraries have."""
    key = name.lower().replace("_", "-").rpartition(".")[2]
    if key in FORMS:
        return f"what PyTorch or NumPy call so is here, for example, {FORMS[key]}"
    return WORDS.get(key)
