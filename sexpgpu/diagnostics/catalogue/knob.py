"""Codes E-KNOB-…: title and page of each. A code is never reused."""

from sexpgpu.diagnostics.core import Entry

CODES: dict[str, Entry] = {
    "E-KNOB-001": Entry("unknown knob", "A `--set` or a variant names a knob that no file of the program defines.\n\nWrong: `--set learning-rate=1e-3` where the file says `(defknob lr 1e-3)`\nRight: `--set lr=1e-3`\n\n`sexpgpu explain FILE` lists the knobs."),
    "E-KNOB-002": Entry("knob out of bounds", "A value lies outside the `:min`, `:max` or `:one-of` of its knob. The bounds hold for every source: default, variant and `--set`.\n\nWrong: `--set hidden=0` for `(defknob hidden 128 :min 1)`\nRight: `--set hidden=1`"),
    "E-KNOB-003": Entry("wrong kind of value", "A knob keeps the kind of its default. An integer knob takes only whole numbers, a float knob any number, a name or string knob the text as it stands, a list knob `[1 2]`.\n\nWrong: `--set batch=64.5`\nRight: `--set batch=64`"),
    "E-KNOB-004": Entry("defined twice", "Knob and variant names are global over the main file and its imports, so each may be defined once.\n\nWrong: `(defknob lr 1e-3) (defknob lr 1e-4)`\nRight: `(defknob lr 1e-3) (defvariant slow :lr 1e-4)`"),
    "E-KNOB-005": Entry("unknown variant", "`--variant` or `:extends` names a variant that is not defined.\n\nWrong: `--variant huge` where the file has only `wide`\nRight: `--variant wide`"),
    "E-KNOB-006": Entry("set twice", "One run takes one value a knob.\n\nWrong: `--set lr=1 --set lr=2`\nRight: `--set lr=2`"),
    "E-KNOB-007": Entry("unreadable --set", "`--set` takes `name=value`; the text after the first `=` is one datum, which is not evaluated.\n\nWrong: `--set betas=[0.9`\nRight: `--set 'betas=[0.9 0.95]'`"),
    "E-KNOB-008": Entry("reserved knob name", "Names with `/` stand for overrides of the file (`run/train/steps`), so a knob cannot have one.\n\nWrong: `(defknob run/steps 3)`\nRight: `(defknob run-steps 3)`"),
    "E-KNOB-009": Entry("variant extends itself", "The `:extends` of some variants form a circle.\n\nWrong: `(defvariant a :extends b) (defvariant b :extends a)`\nRight: `(defvariant a :lr 1) (defvariant b :extends a)`"),
    "E-KNOB-010": Entry("knob used before it is defined", "A knob's default sees the knobs before it, and this one reads a later one, or itself.\n\nWrong: `(defknob heads (/ width 64)) (defknob width 256)`\nRight: `(defknob width 256) (defknob heads (/ width 64))`"),
    "E-KNOB-011": Entry("bounds that nothing satisfies", "The `:min` of a knob is above its `:max`.\n\nWrong: `(defknob rate 0.1 :min 1 :max 0)`\nRight: `(defknob rate 0.1 :min 0 :max 1)`"),
    "W-KNOB-001": Entry("unused knob", "`sexpgpu check` warns: no file of the program reads the knob, so setting it changes nothing.\n\nWhy: it was left over, or the place that should read it has a number instead.\n\nWrong: `(defknob hidden 128)` with `(linear x 128)`\nRight: `(linear x hidden)`"),
}
