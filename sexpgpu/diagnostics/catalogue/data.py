"""Codes E-DATA-…: title and page of each. A code is never reused."""

from sexpgpu.diagnostics.core import Entry

CODES: dict[str, Entry] = {
    "E-DATA-001": Entry(
        "data not found",
        """\
A file that `defdata` names is not there or cannot be read.

Why: A location in the file is relative to the file's folder, not to where you are.

Wrong:
    (csv "digits.csv.gz" …)     ; the file lies in data/

Right:
    (csv "data/digits.csv.gz" …)
""",
    ),
    "E-DATA-002": Entry(
        "no such column",
        """\
A field has no column of its name in the header.

Why: A scalar field takes the column of its name; a field of shape [n] takes name_0 … name_(n-1).

Wrong:
    :fields ((image f32 [65]))   ; the file has image_0 … image_63

Right:
    :fields ((image f32 [64]))
""",
    ),
    "E-DATA-003": Entry(
        "not a number",
        """\
A cell of a column that a field takes is not a decimal number.

Why: Nothing is guessed: an empty cell or a word would train on something you did not mean.

Wrong:
    label
    seven

Right:
    label
    7
""",
    ),
    "E-DATA-004": Entry(
        "ragged row",
        """\
A row has more or fewer cells than the header.

Why: A shifted row would put numbers into the wrong fields. Cells that hold commas are quoted.

Wrong:
    a,b
    1,2,3

Right:
    a,b,c
    1,2,3
""",
    ),
    "E-DATA-005": Entry(
        "broken gzip file",
        """\
The file is not gzip, ends early, or fails its checksum.

Why: A download or a copy was probably cut.

Wrong:
    data.csv.gz of half its size

Right:
    fetch it again; `gzip -t data.csv.gz` says nothing when it is whole
""",
    ),
    "E-DATA-006": Entry(
        "no rows",
        """\
The file is empty or has only a header.

Why: There is nothing to train on.

Wrong:
    a,b

Right:
    a,b
    1,2
""",
    ),
    "E-DATA-007": Entry(
        "column named twice",
        """\
The header has one name twice.

Why: A field would not know which of the two it takes.

Wrong:
    label,label

Right:
    label,label_2
""",
    ),
    "E-DATA-008": Entry(
        "not UTF-8",
        """\
The file has bytes that are not UTF-8 text.

Why: It was probably saved in an older encoding.

Wrong:
    a file in Latin-1

Right:
    iconv -f latin1 -t utf-8 old.csv > new.csv
""",
    ),
    "E-DATA-009": Entry(
        "number does not fit",
        """\
A number is outside its field's type, is not finite, or is no whole number where one is needed.

Why: It would be changed silently otherwise.

Wrong:
    (label i32) with 3.5 in a row

Right:
    (label f32), or mend the row
""",
    ),
    "E-DATA-010": Entry(
        "unknown data format",
        """\
`defdata` names a format that this version has not.

Why: Formats are found by name.

Wrong:
    (cvs "data.csv" …)

Right:
    (csv "data.csv" …)
""",
    ),
    "E-DATA-011": Entry(
        "field not possible in this format",
        """\
The field's shape or type cannot come from this format.

Why: csv has one number a cell: fields are scalars or of shape [n].

Wrong:
    :fields ((image f32 [8 8]))

Right:
    :fields ((image f32 [64]))   ; reshape in the model
""",
    ),
    "E-DATA-012": Entry(
        "not readable as csv",
        """\
The file breaks the rules of quoting.

Why: A quote that never closes swallows the rows after it.

Wrong:
    1,"2

Right:
    1,2
""",
    ),
    "E-DATA-013": Entry(
        "split not possible",
        """\
The shares do not sum to 1, a part does not exist, or a part has no rows.

Why: Every row belongs to exactly one part.

Wrong:
    :split ((train 4/5) (valid 1/10))

Right:
    :split ((train 4/5) (valid 1/5))
""",
    ),
    "E-DATA-014": Entry(
        "value out of range",
        """\
A field holds a value that an op which takes it directly cannot use, such as a label beyond the classes.

Why: It is found before the first step, in the whole source.

Wrong:
    labels 0 … 10 with a layer of 10 outputs

Right:
    11 outputs, or labels 0 … 9
""",
    ),
}
