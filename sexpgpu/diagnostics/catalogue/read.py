"""Codes E-READ-…: title and page of each. A code is never reused."""

from sexpgpu.diagnostics.catalogue.page import page
from sexpgpu.diagnostics.core import Entry

CODES: dict[str, Entry] = {
    "E-READ-001": Entry("unclosed bracket", page(
        "A `(` or `[` has no partner before the end of the text. The place is the innermost one that is open; the mistake "
        "is often where the indentation stops to fit.", "(defun f (x) (+ x 1)", "(defun f (x) (+ x 1))")),
    "E-READ-002": Entry("stray bracket", page(
        "A `)` or `]` stands where no list is open.", "(+ 1 2))", "(+ 1 2)")),
    "E-READ-003": Entry("mismatched brackets", page(
        "`(` is closed by `)` and `[` by `]`. An inner list may still be open.", "(reshape x [2 3)]", "(reshape x [2 3])")),
    "E-READ-004": Entry("unterminated string", page(
        'A string begins and ends with `"`. The text ended inside one; the quote that was forgotten may be far above.',
        '(tap "norm x)', '(tap "norm" x)')),
    "E-READ-005": Entry("quote with nothing after it", page(
        "`'`, `` ` ``, `,` and `,@` belong to the form that follows, and none does.", "(list a ')", "(list a 'b)")),
    "E-READ-006": Entry("not a number", page(
        "What begins with a digit is a number: an integer, a float or a ratio. Names begin with another character. A float "
        "is at most about 1.8e308.", "(list 1.5.2 3d-conv 1/0)", "(list 1.52 conv-3d 1/3)")),
    "E-READ-007": Entry("nested too deeply", page(
        "Lists may stand within each other 1,000 deep. Text that a program wrote can often be a flat list instead.",
        "(((((… 1,001 times", "[a b c]")),
    "E-READ-008": Entry("unknown escape", page(
        'In a string `\\` begins an escape: `\\n` `\\t` `\\r` `\\0` `\\\\` `\\"` `\\xHH` `\\uHHHH` `\\u{H…}`.',
        '"C:\\data"', '"C:\\\\data"')),
    "E-READ-009": Entry("block comment does not pair", page(
        "`#|` begins a comment and `|#` ends it; comments nest, so each beginning needs an end.",
        "#| a #| b |#", "#| a #| b |# |#")),
    "E-READ-010": Entry("not a name", page(
        "A name is made of printable characters other than brackets, quotes, `;` and `,`, and does not begin with `#`. A "
        "keyword is `:` and a name.", "#name : x", "name :x")),
    "E-READ-011": Entry("nothing to leave out", page(
        "`#;` leaves out the one form after it, and none follows.", "(list 1 #;)", "(list 1 #;2)")),
    "E-READ-012": Entry("not one value", page(
        "A value given outside a file is one form. The shell may have taken it apart: quote the whole.",
        "--set widths=[64 32]", "--set 'widths=[64 32]'")),
    "E-READ-013": Entry("integer too long", page(
        "An integer in the text has at most 4,000 digits. Larger ones can be computed.",
        "10000… (5,001 digits)", "(expt 10 5000)")),
    "E-READ-014": Entry("file cannot be read", page(
        "A file of the program could not be opened, is not UTF-8 text, or is larger than 4,000,000 bytes.",
        "a model file saved as Latin-1", "the same file saved as UTF-8")),
}
