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
    "E-DATA-015": Entry(
        "the data cache is not used",
        """\
A warning: parsed data is kept for this run only, and the next one parses again.

Why: The cache folder belongs to another user, others may write to it, or it cannot be written. What lies in it is trusted, so it must be yours.

Wrong:
    chmod 777 ~/.cache/sexpgpu

Right:
    chmod 700 ~/.cache/sexpgpu, or export XDG_CACHE_HOME=/a/folder/of/yours
""",
    ),
    "E-DATA-016": Entry(
        "not enough disk",
        """\
What the run writes takes more than the disk has free: parsed records, or checkpoints.

Why: A run that fills the disk fails hours later. The message has both numbers.

Wrong:
    :keep 20 of a model of 8 GiB on a disk with 50 GiB

Right:
    :keep 3, or --checkpoint-dir on a larger disk; XDG_CACHE_HOME says where parsed data goes
""",
    ),
    "E-DATA-017": Entry(
        "no tokenizer",
        """\
The file that `(bpe …)` names is not there or is no tokenizer.

Why: A path in the file is relative to the file's folder. The format is the JSON of the `tokenizers` library.

Wrong:
    (text "corpus.txt" :tokens (bpe "corpus.txt"))

Right:
    sexpgpu data tokenize corpus.txt --vocab 8192 --out tok
    (text "corpus.txt" :tokens (bpe "tok/tokenizer.json"))
""",
    ),
    "E-DATA-018": Entry(
        "a worker ended",
        """\
A process that parses data ended by itself.

Why: The system ends processes when memory is used up.

Wrong:
    a run beside another that takes all memory

Right:
    run again with more free memory
""",
    ),
    "E-DATA-019": Entry(
        "nothing to tokenize or build",
        """\
`sexpgpu data` cannot do what it was asked: the input has nothing in it, or the options contradict each other.

Why: The message says which.

Wrong:
    sexpgpu data tokenize empty.txt --vocab 100 --out tok

Right:
    sexpgpu data tokenize corpus.txt --vocab 8192 --out tok
""",
    ),
    "E-DATA-020": Entry(
        "manifest not readable",
        """\
The manifest is not JSON in UTF-8.

Why: It was cut, or the location is that of another file.

Wrong:
    (manifest "data/part-0.jsonl.gz" …)

Right:
    (manifest "data/data-manifest-v1.json" …)
""",
    ),
    "E-DATA-021": Entry(
        "manifest of another form",
        """\
A value in the manifest is missing or of another kind than version 1 has; the message has its path.

Why: Counts must add up: records of a split are the sum over its shards.

Wrong:
    {"version": 1, "splits": {"train": {"records": "3", …}}}

Right:
    {"version": 1, "data_format": "jsonl.gz", "splits": {"train": {"records": 3, …}}}
""",
    ),
    "E-DATA-022": Entry(
        "no such split or stage",
        """\
The manifest has no split or stage of that name, or none is chosen where there are several.

Why: The manifest says which there are, and the message lists them.

Wrong:
    (batches corpus :split trian :batch 64)

Right:
    (batches corpus :split train :batch 64)
""",
    ),
    "E-DATA-023": Entry(
        "shard not found",
        """\
A shard that the manifest lists is not there or cannot be read.

Why: It was renamed or removed, or the manifest is of another version of the data. URIs are raw: `%20` stands for itself.

Wrong:
    mv shards/part-0.jsonl.gz shards/part-zero.jsonl.gz

Right:
    sexpgpu data verify data-manifest-v1.json
""",
    ),
    "E-DATA-024": Entry(
        "shard of another size",
        """\
A shard has more or fewer bytes than the manifest says.

Why: It was cut in a copy, or replaced.

Wrong:
    a shard of half its size

Right:
    fetch it again; sexpgpu data verify says which are whole
""",
    ),
    "E-DATA-025": Entry(
        "shard of other content",
        """\
A shard's digest is not the manifest's.

Why: Bits changed, or it was replaced by another file of the same size.

Wrong:
    one byte changed

Right:
    fetch it again; sexpgpu data verify says which are whole
""",
    ),
    "E-DATA-026": Entry(
        "another number of records",
        """\
A shard has more or fewer records than the manifest says.

Why: The order of samples counts records by the manifest. Nothing is skipped or added silently.

Wrong:
    "records": 100 for a shard of 99

Right:
    have the manifest written again: sexpgpu data build
""",
    ),
    "E-DATA-027": Entry(
        "shard damaged",
        """\
A shard is not whole in its format: gzip, Parquet, or frames of MessagePack.

Why: It ends early, has something after its end, or fails a checksum.

Wrong:
    cat a.jsonl.gz b.jsonl.gz > both.jsonl.gz

Right:
    one gzip member a shard
""",
    ),
    "E-DATA-029": Entry(
        "a read that stalls",
        """\
Nothing came from a shard for a minute.

Why: A disk or a store that hangs would keep the run waiting for ever.

Wrong:
    a mount whose server is gone

Right:
    see whether the store answers, then run again
""",
    ),
    "E-DATA-030": Entry(
        "rows and sequences",
        """\
`batches` is asked of a sequence of tokens, or `windows` of rows, or either of atomic structures.

Why: `text` and `tokens` are one long sequence, which `windows` cuts into samples; `extxyz` has structures, which `graphs`
packs; the other formats have a sample a row.

Wrong:
    (batches corpus :batch 32)

Right:
    (windows corpus :context 128 :batch 32)
""",
    ),
    "E-DATA-031": Entry(
        "not a whole NumPy file",
        """\
The file is neither a .npy nor an .npz, or it was cut.

Why: Its first bytes, its header or its length are not those NumPy writes.

Wrong:
    np.savetxt("x.npy", x)

Right:
    np.save("x.npy", x)
""",
    ),
    "E-DATA-032": Entry(
        "array of Python objects",
        """\
An array holds Python objects, which NumPy keeps as a pickle.

Why: A pickle can run any program when it is loaded, so none ever is. Lists of different lengths become such an array too.

Wrong:
    np.save("x.npy", np.array([[1, 2], [3]], dtype=object))

Right:
    np.save("x.npy", np.array([[1, 2], [3, 0]], dtype=np.float32))
""",
    ),
    "E-DATA-033": Entry(
        "other dtype or shape than declared",
        """\
An array of the file has another kind of number, or another shape, than its field says.

Why: Axis 0 is the row, and a field's shape is that of one row. Integers may become floats, and floats other floats; floats become integers only by you.

Wrong:
    :fields ((image f32 [64]))   ; the array is [1797 8 8]

Right:
    :fields ((image f32 [8 8]))
""",
    ),
    "E-DATA-034": Entry(
        "no array for a field",
        """\
An .npz has no array of the field's name, or a .npy is asked for more than one field.

Why: A .npy is a single array; in an .npz each field is found by its name.

Wrong:
    (npy "x.npz" :fields ((img f32 [64])))   ; it has image and label

Right:
    (npy "x.npz" :fields ((image f32 [64])))
""",
    ),
    "E-DATA-035": Entry(
        "part of a token at the end",
        """\
The length of a token file is no multiple of the size of a token.

Why: A u16 has two bytes and a u32 four. The file was cut, has a header, or has another dtype.

Wrong:
    (tokens "train.bin" :dtype u32)   ; 1,002 bytes

Right:
    (tokens "train.bin" :dtype u16)
""",
    ),
    "E-DATA-036": Entry(
        "shorter than one window",
        """\
A part has fewer tokens than one window and its targets.

Why: A window of :context tokens needs one token more, since its targets are one later.

Wrong:
    (windows corpus :split valid :context 1024 :batch 8)   ; valid has 900 tokens

Right:
    (windows corpus :split valid :context 512 :batch 8)
""",
    ),
    "E-DATA-037": Entry(
        "not a JSON record",
        """\
A line is not one JSON object.

Why: jsonl has a record a line; a list, a bare number or half an object is none.

Wrong:
    [1, 2, 3]

Right:
    {"x": [1, 2, 3]}
""",
    ),
    "E-DATA-038": Entry(
        "record without a key",
        """\
A record does not have the key that a field takes.

Why: Nothing stands for a value that is not there.

Wrong:
    {"lable": 3}

Right:
    {"label": 3}
""",
    ),
    "E-DATA-039": Entry(
        "value of another form",
        """\
A record's value is no number, or its lists do not have the field's shape.

Why: Every record of a field has one shape; lists of different lengths have none.

Wrong:
    {"x": [1, 2]}   ; x is f32 [3]

Right:
    {"x": [1, 2, 0]}
""",
    ),
    "E-DATA-040": Entry(
        "weights to start from not found",
        """\
The file that `:init` names is not there or cannot be read.

Why: A path in the file is relative to the file's folder, not to where you are.

Wrong:
    :init (from "w.safetensors")     ; the file lies in weights/

Right:
    :init (from "weights/w.safetensors")
""",
    ),
    "E-DATA-041": Entry(
        "not a whole safetensors file",
        """\
The file that `:init` names is not in the safetensors format, or it was cut.

Why: Weights are read from safetensors only; other formats keep a pickle, which can run any program. The header is at most 64 MiB.

Wrong:
    :init (from "model.pt")

Right:
    :init (from "model.safetensors")   ; written by `sexpgpu export` or by the safetensors library
""",
    ),
    "E-DATA-042": Entry(
        "weights do not fit",
        """\
Tensors of the file that `:init` names have another shape or another kind of number than the program's of the same name.

Why: Nothing is cut, filled up or rounded silently. A name that is not in the file keeps its own initial value.

Wrong:
    (linear x 10 :name "out")      ; the file's out/weight is [128 1000]

Right:
    (linear x 10 :name "digits")   ; starts from its own initial value
""",
    ),
    "E-DATA-043": Entry(
        "no weights taken",
        """\
None of the program's parameters is in the file that `:init` names.

Why: The run would start from scratch although weights were asked for; the names differ.

Wrong:
    :init (from "w.safetensors")   ; it has old/encoder/…, and the program encoder/…

Right:
    :init (from "w.safetensors" :map (("encoder/**" "old/encoder/**")))
""",
    ),
    "E-DATA-044": Entry(
        "shard listed twice",
        """\
One list of the manifest has the same shard twice.

Why: Its records would count twice in every epoch.

Wrong:
    "shards": [{"uri": "part-0.jsonl.gz", …}, {"uri": "part-0.jsonl.gz", …}]

Right:
    list it once
""",
    ),
    "E-DATA-045": Entry(
        "library not installed",
        """\
Reading this format needs a library that is not installed.

Why: It is large, and few need it.

Wrong:
    a manifest of parquet shards with `pip install sexpgpu`

Right:
    pip install 'sexpgpu[parquet]'
""",
    ),
    "E-DATA-046": Entry(
        "something else is there",
        """\
`sexpgpu data` does not write over files that hold something else.

Why: Data that runs were trained on would be lost. The same input gives the same bytes, and those are left as they are.

Wrong:
    sexpgpu data build b.jsonl --out data     ; data/ holds what was built from a.jsonl

Right:
    sexpgpu data build b.jsonl --out data-b
""",
    ),
    "E-DATA-060": Entry(
        "not a frame of extended XYZ",
        """\
A frame is the number of atoms, a line of key=value pairs, and a line for each atom. The message names frame and line.

Why: What is not as Properties say would train on other numbers than those meant.

Wrong:
    2
    Properties=species:S:1:pos:R:3:forces:R:3 energy=-1.5
    H 0 0 0                                 ; no forces

Right:
    H 0 0 0 0.1 0 -0.2
""",
    ),
    "E-DATA-061": Entry(
        "a frame without a label that is required",
        """\
Every frame has the labels that `:required` names, under the keys that the source states.

Why: A frame without a label would train on zeros.

Wrong:
    (extxyz "set.extxyz" :elements (H O) :cutoff 5)     ; the file has REF_energy=…

Right:
    (extxyz "set.extxyz" :elements (H O) :cutoff 5 :energy-key "REF_energy")
""",
    ),
    "E-DATA-062": Entry(
        "an element that is not named",
        """\
The file has an element that `:elements` of its source does not name.

Why: Parameters belong to elements, so their number is stated in the file and does not depend on its data.

Wrong:
    (extxyz "ethanol.extxyz" :elements (H C) :cutoff 5)

Right:
    (extxyz "ethanol.extxyz" :elements (H C O) :cutoff 5)
""",
    ),
    "W-DATA-001": Entry(
        "field that nobody reads",
        """\
`sexpgpu check` warns: a field is declared, and no loss, metric or evaluation takes it.

Why: A label that is never read trains nothing; a misspelt parameter would be an error, a missing one is not.

Wrong:
    :fields ((image f32 [64]) (label i32) (weight f32))   ; (defun loss (image label) …)

Right:
    :fields ((image f32 [64]) (label i32))
""",
    ),
    "W-DATA-002": Entry(
        "source that nobody uses",
        """\
`sexpgpu check` warns: no run and no evaluation names the data source.

Why: It was left over, or the name in a `:data` is that of another one.

Wrong:
    (defdata extra (csv "extra.csv" …))   ; every :data says (batches digits …)

Right:
    remove it, or :data (batches extra :batch 64)
""",
    ),
    "W-DATA-003": Entry(
        "loss that ignores a field",
        """\
`sexpgpu check` warns: the loss takes a field, but its value does not depend on it.

Why: A loss without its label goes down and means nothing.

Wrong:
    (defun loss (image label) (cross-entropy (model image) (argmax (model image))))

Right:
    (defun loss (image label) (cross-entropy (model image) label))
""",
    ),
}
