"""Codes E-SHAPE-…: title and page of each. A code is never reused."""

from sexpgpu.diagnostics.catalogue.page import page
from sexpgpu.diagnostics.core import Entry

CODES: dict[str, Entry] = {
    "E-SHAPE-001": Entry(
        "shapes do not broadcast",
        "Two tensors are combined element by element. Their axes are matched from the last; two sizes must be "
        "equal, or one of them 1. Use reshape or expand-dims to line axes up, or broadcast to repeat one.",
    ),
    "E-SHAPE-002": Entry(
        "dtypes differ",
        "Two tensors of different dtype never mix by themselves. Cast one of them: (cast x f32).",
    ),
    "E-SHAPE-003": Entry(
        "inner dimensions differ",
        "(matmul a b) sums over the last axis of a and the last but one of b: [m k] by [k n] is [m n]. The "
        "message shows where both sizes come from. A weight may need (transpose w), or a layer another width.",
    ),
    "E-SHAPE-004": Entry(
        "no such axis",
        "Axes are counted from 0, or from the end by negative numbers: -1 is the last. Each may be named once.",
    ),
    "E-SHAPE-005": Entry(
        "the number of elements changes",
        "reshape keeps every element, so the product of the sizes stays; one size may be -1, it is then computed. "
        "squeeze takes away axes of size 1 only.",
    ),
    "E-SHAPE-006": Entry(
        "an op of floats got another dtype",
        "Division, means, exponentials and products of matrices are for float tensors: cast integers and bools "
        "first, (cast x f32). A float bound with an integer tensor needs the cast too.",
    ),
    "E-SHAPE-007": Entry(
        "wrong number of axes",
        "The op needs a tensor of another rank; the message says which. reshape, expand-dims and squeeze change "
        "the rank.",
    ),
    "E-SHAPE-008": Entry(
        "tensors to join differ",
        "concat joins along one axis; all other axes must have equal sizes.",
    ),
    "E-SHAPE-009": Entry(
        "the slice does not lie in the axis",
        "slice takes :start … :stop (not included) of one axis. Negative bounds count from the end; :step is 1 or "
        "more.",
    ),
    "E-SHAPE-010": Entry(
        "no order of the axes",
        "The permutation of transpose names every axis once: [0 2 1] swaps the last two of three.",
    ),
    "E-SHAPE-011": Entry(
        "a bool tensor is needed",
        "Masks and logic take bool tensors, which comparisons give: (> x 0).",
    ),
    "E-SHAPE-012": Entry(
        "indices must be integers",
        "Indices and labels are i32 or i64 tensors. Declare the field as i32, or (cast x i32).",
    ),
    "E-SHAPE-013": Entry(
        "a size is not a whole number",
        "Sizes of a shape and counts are integers of 0 or more, known when the file is read. A division that "
        "leaves a fraction, as (/ 130 4), is the usual cause.",
    ),
    "E-SHAPE-014": Entry(
        "too few operands",
        "The op needs more tensors than it was given.",
    ),
    "E-SHAPE-015": Entry(
        "an attribute the op does not take",
        "The value of a keyword is outside what the op accepts; the message says what it takes.",
    ),
    "E-SHAPE-016": Entry(
        "only a scalar has a gradient",
        "(grad y x) needs a float y with no axes: take (mean y) or (sum y) first.",
    ),
    "E-SHAPE-017": Entry(
        "no gradient by this tensor",
        "Gradients are by float tensors: fields, parameters, states or (variable x). An integer or bool tensor "
        "has none.",
    ),
    "E-SHAPE-021": Entry(
        "more elements than the axis has",
        "top-k takes 1 or more elements of one axis, and at most as many as it has.",
    ),
    "E-SHAPE-022": Entry(
        "a variance of too few elements",
        "The variance divides by the number of elements less :correction (1 unless given), which must be 1 or more. Of "
        "one element only (variance x :correction 0) is defined: it is 0.",
    ),
    "E-SHAPE-023": Entry(
        "no einsum equation",
        "An equation has letters for the axes of each operand, commas between operands, and after -> the letters of "
        "the result: (einsum a b :equation \"bij,bjk->bik\"). ... stands for leading axes.",
    ),
    "E-SHAPE-024": Entry(
        "shapes do not fit a convolution or a pool",
        "x is [samples channels …], the weight [outputs channels/groups …], the bias [outputs]. The kernel, spread by "
        ":dilation, may not be longer than the axis with its padding.",
    ),
    "E-SHAPE-025": Entry(
        "a setting of a convolution or a pool",
        ":stride, :dilation and windows are 1 or more, :padding 0 or more (at most half of a pool's window): one number "
        "for all spatial axes, or a list of one for each.",
    ),
    "E-SHAPE-026": Entry(
        "the mask does not fit the scores",
        "attend's one mask, bool or float, must broadcast to the scores [… queries keys].",
    ),
    "E-SHAPE-030": Entry(
        "no Cartesian tensors",
        "Directions are vectors, [… 3]. Features of ranks 0 … l have (l+1)² components on axis 1, 1 3 5 … of them for each "
        "rank, and their channels on axis 2: [rows (l+1)² channels].",
    ),
    "E-SHAPE-031": Entry(
        "no such path of a tensor product",
        "Ranks l1 and l2 multiply to the ranks l3 from |l1-l2| to l1+l2 for which l1+l2+l3 is even. A tensor of rank l keeps "
        "its sign under inversion if l is even, and changes it if l is odd; a product with an odd sum, such as the cross "
        "product of two vectors, would be of the other kind, and there are no such tensors here.",
    ),
    "E-SHAPE-032": Entry(
        "a symmetric product of two tensors",
        ":symmetric true leaves out the paths that only swap the operands, which is right when both are one tensor: "
        "(tensor-product x x weights :symmetric true).",
    ),
    "E-SHAPE-033": Entry(
        "channels do not pair",
        "A tensor product multiplies channel by channel. Both operands have the same number, or one has a single channel "
        "that meets all of the other's. A linear map before the product changes the number.",
    ),
    "E-SHAPE-034": Entry(
        "weights of another width",
        "A tensor product has a weight for every path and channel: [rows paths·channels], or [paths·channels] for all rows. "
        "(length (product-paths l1 l2 l-max)) is the number of paths.",
    ),
    "E-SHAPE-035": Entry(
        "rows and edges do not fit",
        "By rows, both operands have the same number of rows. A convolution takes senders and receivers, both [edges], and "
        "the second operand and weights have a row an edge.",
    ),
}

#: code -> a wrong and a right expression over x f32[8 4], y f32[8 5], image f32[8 3 8 8], label i32[8]; the tests run them
EXAMPLES: dict[str, tuple[str, str]] = {
    "E-SHAPE-001": ("(+ x y)", "(+ x (linear y 4))"),
    "E-SHAPE-002": ("(* (mean x :axis 1) label)", "(* (mean x :axis 1) (cast label f32))"),
    "E-SHAPE-003": ('(matmul x (param "w" [5 2] :init zeros))', '(matmul x (param "w" [4 2] :init zeros))'),
    "E-SHAPE-004": ("(softmax x :axis 2)", "(softmax x :axis -1)"),
    "E-SHAPE-005": ("(reshape x [8 5])", "(reshape x [8 2 2])"),
    "E-SHAPE-006": ("(exp label)", "(exp (cast label f32))"),
    "E-SHAPE-007": ("(matmul (mean x) x)", "(* (mean x) x)"),
    "E-SHAPE-008": ("(concat x (transpose x) :axis 1)", "(concat x y :axis 1)"),
    "E-SHAPE-009": ("(slice x :axis 1 :start 2 :stop 9)", "(slice x :axis 1 :start 2 :stop 4)"),
    "E-SHAPE-010": ("(transpose image [0 2])", "(transpose image [0 2 1 3])"),
    "E-SHAPE-011": ("(logical-not x)", "(logical-not (> x 0))"),
    "E-SHAPE-012": ('(embed (param "table" [9 4] :init zeros) x)', '(embed (param "table" [9 4] :init zeros) label)'),
    "E-SHAPE-013": ("(reshape x [8 (/ 8 3)])", "(reshape x [8 (/ 8 2)])"),
    "E-SHAPE-014": ("(concat [] :axis 1)", "(concat [x y] :axis 1)"),
    "E-SHAPE-015": ("(clamp x)", "(clamp x :low 0 :high 1)"),
    "E-SHAPE-016": ("(grad x x)", "(grad (sum x) x)"),
    "E-SHAPE-017": ("(grad (mean x) label)", "(grad (mean x) x)"),
    "E-SHAPE-021": ("(top-k x 9)", "(top-k x 2)"),
    "E-SHAPE-022": ("(variance (slice x :axis 1 :start 0 :stop 1) :axis 1)", "(variance x :axis 1)"),
    "E-SHAPE-023": ('(einsum x y :equation "ij->jk->ik")', '(einsum x x :equation "ij,kj->ik")'),
    "E-SHAPE-024": ('(convolve image (param "kernel" [2 4 3 3] :init zeros))', '(convolve image (param "kernel" [2 3 3 3] :init zeros))'),
    "E-SHAPE-025": ("(max-pool image :window 0)", "(max-pool image :window 2)"),
    "E-SHAPE-026": ('(attend image image image (param "mask" [5 5] :init zeros))', '(attend image image image (param "mask" [8 8] :init zeros))'),
    "E-SHAPE-030": ("(cartesian-expand x :l-max 2)", "(cartesian-expand (slice x :axis 1 :start 0 :stop 3) :l-max 2)"),
    "E-SHAPE-031": ('(tensor-product x x (param "w" [2] :init zeros) :paths [[0 0 0] [1 1 1]])',
                    '(tensor-product x x (param "w" [2] :init zeros) :paths [[0 0 0] [1 0 1]])'),
    "E-SHAPE-032": ('(tensor-product x (* 2 x) (param "w" [3] :init zeros) :symmetric true)',
                    '(tensor-product x x (param "w" [3] :init zeros) :symmetric true)'),
    "E-SHAPE-033": ('(tensor-product (reshape image [8 4 48]) (reshape image [8 16 12]) (param "w" [48] :init zeros) :l-max 0)',
                    '(tensor-product (reshape image [8 4 48]) x (param "w" [96] :init zeros) :l-max 0)'),
    "E-SHAPE-034": ('(tensor-product x x (param "w" [3] :init zeros))', '(tensor-product x x (param "w" [4] :init zeros))'),
    "E-SHAPE-035": ('(tensor-product x (slice x :axis 0 :start 0 :stop 4) (param "w" [4] :init zeros))',
                    '(tensor-product x x (param "w" [4] :init zeros))'),
}
CODES |= {code: Entry(CODES[code].title, page(CODES[code].page, *EXAMPLES[code])) for code in EXAMPLES}
