"""Codes E-EVAL-0…: title and page of each (those of the def-forms are in forms.py). A code is never reused."""

from sexpgpu.diagnostics.catalogue.forms import EVAL
from sexpgpu.diagnostics.catalogue.page import page
from sexpgpu.diagnostics.core import Entry

CODES: dict[str, Entry] = {
    "E-EVAL-001": Entry("unknown name", page(
        "A name has no meaning here: no parameter or `let` around it, no definition of the file, no import and no builtin "
        "has it. Names of the library need their `(import …)`.", "(lenght xs)", "(length xs)")),
    "E-EVAL-002": Entry("not a function", page(
        "The first element of a list is called, and here it is no function. A list of values is written `[a b]` or "
        "`(list a b)`, data `'(a b)`.", "(reshape x (2 3))", "(reshape x [2 3])")),
    "E-EVAL-003": Entry("wrong number of arguments", page(
        "A call gives more or fewer arguments than the function has parameters.",
        "(defun f (a b) …) (f 1)", "(f 1 2)")),
    "E-EVAL-004": Entry("keyword argument", page(
        "A call gives a keyword that the function does not have, gives one twice, or gives one without a value. To pass a "
        "keyword as a plain value, quote it.", "(f x :rat 0.1)", "(f x :rate 0.1)")),
    "E-EVAL-005": Entry("form written otherwise", page(
        "A form of the language has parts in a certain order; the help shows it.", "(let (x 1) x)", "(let ((x 1)) x)")),
    "E-EVAL-006": Entry("wrong kind of argument", page(
        "A builtin got a value of a kind that it has no answer for.", '(+ 1 "2")', "(+ 1 2)")),
    "E-EVAL-007": Entry("no such number", page(
        "A division by zero, or a root, logarithm or power without a real value.", "(/ 1 0)", "(/ 1 2)")),
    "E-EVAL-008": Entry("outside the list", page(
        "An index is below 0 or not below the length; elements count from 0.", "(nth 3 [1 2 3])", "(nth 2 [1 2 3])")),
    "E-EVAL-009": Entry("decision on a tensor", page(
        "`if` and its kin choose while the program is built. A tensor has its values only when the program runs, so the "
        "choice is made there, element by element.", "(if (> x 0) x 0)", "(where (> x 0) x 0)")),
    "E-EVAL-010": Entry("name from two imports", page(
        "Two imported modules define the same name, and it is used here. Import one of them by a name of its own.",
        '(import "a" "b") (f 1)', '(import "a") (import "b" :as b) (b/f 1)')),
    "E-EVAL-011": Entry("module not found", page(
        "An import names no module of the library and no file below the main file's folder.",
        '(import "nm")', '(import "nn")')),
    "E-EVAL-012": Entry("imports in a circle", page(
        "A file imports itself by way of others, so none of them can be first.",
        'a.lisp: (import "b")   b.lisp: (import "a")', "move what both need into c.lisp and import it from both")),
    "E-EVAL-013": Entry("import from outside", page(
        "A file may import the library and what lies below the main file's folder: no absolute path, no `..` and no link "
        "that leads out. So a stranger's program cannot read other files.",
        '(import "../secrets")', '(import "parts/model")')),
    "E-EVAL-014": Entry("name is taken", page(
        "Forms of the language cannot be redefined, and only the main file may shadow a builtin: in a module it would "
        "change what every importer means.", "(defun if (a b) …)", "(defun choose (a b) …)")),
    "E-EVAL-015": Entry("parameter list", page(
        "A parameter list has names, then `&optional`, `&rest` and `&key` with theirs; after `&optional` and `&key` also "
        "`(name default)`.", "(defun f (a (b 2)) …)", "(defun f (a &optional (b 2)) …)")),
    "E-EVAL-016": Entry("list does not fit the names", page(
        "`destructuring-bind` takes a list apart, and the list has another length than the names, or is no list.",
        "(destructuring-bind (a b) [1 2 3] …)", "(destructuring-bind (a b c) [1 2 3] …)")),
    "E-EVAL-017": Entry("insertion outside a template", page(
        "`,` and `,@` insert values into a template, which begins with a backquote; `,@` inserts the elements of a list "
        "into a list.", "(list ,x)", "`(list ,x)")),
    "E-EVAL-018": Entry("setq of an unknown name", page(
        "`setq` changes a parameter, a `let` binding or a definition of the same file.",
        "(setq totl 1)", "(defparameter total 0) (setq total 1)")),
    "E-EVAL-019": Entry("form used as a value", page(
        "Macros and forms of the language are no values: they can be called but not passed on. A macro must be defined at "
        "the top level before the form that calls it.", "(mapcar when xs ys)", "(mapcar (lambda (x y) (when x y)) xs ys)")),
    "E-EVAL-020": Entry("macro result is no form", page(
        "A macro returns a form: symbols, numbers, strings and lists of them. A function or tensor is none.",
        "(defmacro m (x) (lambda (y) y))", "(defmacro m (x) `(lambda (y) ,x))")),
    "E-EVAL-022": Entry("number has no such form", page(
        "A number is too large for a float or for a text, or an infinity or NaN should become an integer.",
        "(float (expt 10 400))", "(float (expt 10 300))")),
    "E-EVAL-023": Entry("stopped by the program", page(
        "The program itself called `error`, or an `assert` of it does not hold. The message is its own.",
        '(assert (= 0 (mod d heads)) "heads must divide d")', "choose values for which it holds")),
    "E-EVAL-041": Entry("evaluation budget used up", page(
        "Building the program took more than SEXPGPU_EVAL_LIMIT units (10,000,000 unless set). A node costs 1, a list "
        "element 4, a character 1, an integer operation its digits, a graph node 100, a parameter 1,000. The notes show "
        "the calls and who spent most; a loop or list that grows without end is the usual cause.",
        "(range 1000000000000)", "(range 12)")),
    "E-EVAL-042": Entry("nested too deeply", page(
        "Calls that wait for another call's value may nest 1,000 deep; macros may not expand without end. A call that is "
        "the last thing a function does does not nest.",
        "(defun total (n) (if (= n 0) 0 (+ n (total (- n 1)))))",
        "(defun total (n sum) (if (= n 0) sum (total (- n 1) (+ sum n))))")),
}

CODES |= EVAL
