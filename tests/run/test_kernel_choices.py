"""What a program measured and chose goes into its checkpoints, and comes back before a resumed run's first step."""

import json

from fake_run import FakeProgram, make_plan
from test_session import go


class Choosing(FakeProgram):
    """A program that chooses at its first step, unless it was given choices."""

    def __init__(self, name="measured"):
        super().__init__()
        self.name, self.chosen, self.given = name, {}, []

    def kernels(self):
        return {"products": dict(self.chosen)}

    def take_kernels(self, kernels):
        assert self.count_of_steps() == 0
        self.given.append(kernels)

    def count_of_steps(self):
        return len(self.trace)

    def step(self, batch, logged):
        for kernels in self.given:
            self.chosen |= kernels["products"]
        self.chosen.setdefault("shape", self.name)
        return super().step(batch, logged)


def manifest(folder, step):
    return json.loads((folder / f"ck/step-{step}/manifest.json").read_text())


def test_choices_are_kept_and_come_back(tmp_path):
    first = Choosing()
    assert go(tmp_path, plan=make_plan(tmp_path, steps=14, program=first)) == 0
    assert manifest(tmp_path, 14)["kernels"] == {"products": {"shape": "measured"}} and not first.given
    second = Choosing("measured anew")
    assert go(tmp_path, plan=make_plan(tmp_path, steps=21, program=second), resume="latest") == 0
    assert second.given == [{"products": {"shape": "measured"}}]
    assert manifest(tmp_path, 21)["kernels"] == {"products": {"shape": "measured"}}


def test_a_program_that_chooses_nothing_has_none(tmp_path):
    assert go(tmp_path, plan=make_plan(tmp_path, steps=7)) == 0
    assert manifest(tmp_path, 7)["kernels"] == {}
