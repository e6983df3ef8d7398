"""Verdicts on invented lines: divergence, the choice of b, too few trials, broken lines, ratios."""

import dataclasses
import json

import pytest

from neuvar import report
from neuvar.cli import main
from neuvar.experiments import EXPERIMENTS, Case, compare, judge, last, make_table, matching
from neuvar.experiments.run_spec import Training, as_dict
from neuvar.report import documents, figures
from neuvar.report.documents import VERDICTS
from tests.test_experiments_results import nvrm_ahead, result

FIVE = 5


def checked(name, change=lambda run: {}, scale="cpu", trials=FIVE, score=nvrm_ahead):
    """The verdict on results in which NVRM is ahead; ``change`` returns what is else of a run."""
    runs = EXPERIMENTS[name].runs(scale, trials)
    results = []
    for run in runs:
        options = {"score": score(run)} | change(run)
        results.append(result(run, options.pop("score"), **options))
    return EXPERIMENTS[name].check(results), EXPERIMENTS[name].table(results)


def diverged(when):
    return lambda run: {"status": "diverged"} if when(run) else {}


class TestDivergence:
    """1 and 2: a case that diverged stays, and never counts in favour."""

    def test_without_it_the_claim_holds(self):
        verdict, _ = checked("pair-flips")
        assert (verdict.outcome, len(verdict.cases)) == ("true", 10)

    @pytest.mark.parametrize(
        ("when", "outcome"),
        [
            (lambda run: run.b > 0, "false"),
            (lambda run: run.b == 0, "undecided"),
            (lambda run: True, "undecided"),
        ],
        ids=["nvrm", "baseline", "both"],
    )
    @pytest.mark.parametrize("rate", [0.1, 0.4], ids=["one b", "every b"])
    def test_a_case_whose_trials_all_diverged(self, when, outcome, rate):
        there = diverged(lambda r: (r.data, r.noise_rate) == ("mnist", rate) and when(r))
        verdict, _ = checked("pair-flips", there)
        assert verdict.outcome == outcome
        assert len(verdict.cases) == 10
        assert verdict.because.endswith(": better in 8 cases, diverged in 2.")

    def test_one_case_in_the_sentence(self):
        cases = [Case("A", (0.2, 0.21)), Case("B", (), 2, failed=True)]
        assert judge("Gain", cases[1:]).because == "Gain: diverged in 1 case."
        assert judge("Gain", cases).because == "Gain: better in 1 case, diverged in 1."
        assert judge("Gain", cases).outcome == "false"

    def test_a_row_of_the_table_stays(self):
        _, whole = checked("robustness")
        _, table = checked("robustness", diverged(lambda r: r.b == 0.02))
        words = [
            [(row[0], row[1].removesuffix(" (chosen)")) for row in t.rows] for t in (whole, table)
        ]
        assert words[0] == words[1]

    @pytest.mark.parametrize("noise", ["uniform", "gaussian"])
    def test_sensitivity_to_b_counts_a_b_that_diverged(self, noise):
        assert checked("noise-types")[0].outcome == "true"
        there = diverged(lambda r: (r.noise, r.b) == (noise, 0.05))
        verdict, _ = checked("noise-types", there)
        ranges = [c for c in verdict.cases if c.name == "range over b, uniform against Gaussian"]
        assert len(ranges) == 1
        assert ranges[0].lost == FIVE
        assert ranges[0].outcome() == ("false" if noise == "uniform" else "undecided")
        assert verdict.outcome == ("false" if noise == "uniform" else "undecided")

    def test_a_range_is_over_the_same_b(self):
        """A trial without the worst b would look less sensitive."""
        runs = EXPERIMENTS["noise-types"].runs("cpu", FIVE)
        some = [r for r in runs if (r.noise, r.b, r.seed) != ("uniform", 0.02, 0)]
        cases = EXPERIMENTS["noise-types"].check([result(r, nvrm_ahead(r)) for r in some]).cases
        assert [len(c.differences) for c in cases if "range" in c.name] == [FIVE - 1] * 2

    @pytest.mark.parametrize("noise", ["uniform", "laplace"])
    def test_a_family_that_learned_nothing_is_not_insensitive(self, noise):
        """At chance for every b: its range is the smallest, but it shows nothing."""
        dead = lambda run: 0.1 if run.noise == noise and run.b else nvrm_ahead(run)  # noqa: E731
        verdict, _ = checked("noise-types", score=dead)
        ranges = [c for c in verdict.cases if noise in c.name.lower() and "range" in c.name]
        assert ranges
        assert all((c.word, c.differences, c.lost) == ("diverged", (), FIVE) for c in ranges)
        assert verdict.outcome == "undecided"

    @pytest.mark.parametrize("b", [0.01, 0.05])
    def test_a_range_with_a_missing_accuracy_is_lost(self, b):
        runs = EXPERIMENTS["noise-types"].runs("cpu", FIVE)
        results = [result(run, nvrm_ahead(run)) for run in runs]
        for lost in (r for r in results if (r.run.noise, r.run.b) == ("uniform", b)):
            lost.line["last"]["test_accuracy"] = None
        verdict = EXPERIMENTS["noise-types"].check(results)
        assert verdict.outcome == "undecided"
        assert [c.lost for c in verdict.cases if "range" in c.name] == [FIVE, FIVE]

    def test_memorizing_nothing_because_nothing_was_learned(self):
        """The network guesses, so it memorizes a tenth of the wrong labels."""
        runs = EXPERIMENTS["gradient-noise"].runs("cpu", FIVE)
        results = [result(run, nvrm_ahead(run)) for run in runs]
        assert EXPERIMENTS["gradient-noise"].check(results).outcome == "true"
        for dead in (r for r in results if r.run.lr == 1.0 and r.run.b):
            dead.line["last"] |= {"test_accuracy": 0.1, "memorized": 0.1}
        assert EXPERIMENTS["gradient-noise"].check(results).outcome == "false"

    def sharpness(self, when):
        runs = EXPERIMENTS["robustness"].runs("cpu", FIVE)
        results = [result(r, nvrm_ahead(r)) for r in runs]
        for found in results:
            if when(found.run):
                found.line["under_noise"]["expected_sharpness"][-1] = None
        return EXPERIMENTS["robustness"].check(results)

    def test_a_scale_whose_loss_is_not_finite_is_not_dropped(self):
        assert self.sharpness(lambda run: False).outcome == "true"
        assert self.sharpness(lambda run: run.b > 0).outcome == "false"
        assert self.sharpness(lambda run: run.b == 0).outcome == "undecided"
        assert self.sharpness(lambda run: run.b > 0 and run.seed == 0).outcome == "undecided"


def trials(*scores, held_out=True, seeds=range(FIVE)):
    """Results of several b: each pair has the test accuracy and the held-out accuracy."""
    return [
        result(Training(data="x", b=b, seed=seed, held_out=int(held_out)), test, held_out=chosen_by)
        for b, (test, chosen_by) in enumerate(scores)
        for seed in seeds
    ]


class TestChoice:
    """3, 4 and 5: b is chosen on held-out images first, and then judged."""

    def poor(self, run):
        """The larger b is far worse, on held-out images too."""
        return {"score": 0.2} if run.b == 0.02 and run.model == "vgg-11" else {}

    @pytest.mark.parametrize("name", ["generalization", "robustness"])
    def test_a_b_that_nobody_chose_is_not_judged(self, name):
        verdict, table = checked(name, self.poor)
        assert verdict.outcome == "true", verdict.because
        at = [case.name for case in verdict.cases if case.name.startswith("VGG")]
        assert len(at) == 2
        assert all(words.endswith(", b = 0.01") for words in at)
        methods = [row[1] for row in table.rows if row[0].startswith("VGG")]
        assert methods == ["SGD", "NVRM-SGD, b = 0.01 (chosen)", "NVRM-SGD, b = 0.02"]

    def test_compare_chooses(self):
        results = trials((0.5, 0.5), (0.7, 0.1), (0.4, 0.9))
        noisy, plain = [r for r in results if r.run.b], matching(results, b=0)
        case = compare("A", noisy, plain, "test_accuracy")
        assert case.name == "A, b = 2"
        assert case.outcome() == "false"
        assert case.choice == "chosen on held-out images in the same trials"

    def test_trials_of_their_own_choose_and_are_not_judged(self):
        results = trials((0.5, 0.5), (0.7, 0.1), (0.4, 0.9))
        results += trials((0.5, 0.5), (0.1, 0.9), (0.9, 0.1), seeds=(1000, 1001))
        noisy, plain = [r for r in results if r.run.b], matching(results, b=0)
        case = compare("A", noisy, plain, "test_accuracy")
        assert case.name == "A, b = 1"
        assert case.choice == "chosen on held-out images in other trials"
        assert case.differences == pytest.approx((0.2,) * FIVE, abs=0.001)

    def test_nothing_held_out(self):
        results = trials((0.5, 0), (0.7, 0), (0.9, 0), held_out=False)
        noisy, plain = [r for r in results if r.run.b], matching(results, b=0)
        case = compare("A", noisy, plain, "test_accuracy", fixed=1)
        assert (case.name, case.choice, case.outcome()) == ("A, b = 1", "fixed in advance", "true")
        case = compare("A", noisy, plain, "test_accuracy")
        verdict = judge("Gain", [case])
        assert verdict.outcome == "undecided"
        assert verdict.because == (
            "Gain: no b was chosen in 1 case. "
            "To choose among several b, set held_out in the runs, or fixed= in compare."
        )
        assert str(case) == "A, b = ?: no b was chosen"

    @pytest.mark.parametrize("name", ["forgetting", "split", "ewc", "ewc-batch-mean"])
    def test_the_papers_b_is_marked_where_nothing_is_held_out(self, name):
        verdict, table = checked(name, scale="paper")
        rows = [row for row in table.rows if any("(the paper's)" in str(c) for c in row)]
        assert rows
        assert all("NVRM-Adam, b = 0.03 (the paper's)" in row for row in rows)
        assert all("b = " not in c.name or c.name.endswith("b = 0.03") for c in verdict.cases)

    @pytest.mark.parametrize("name", ["noise-types", "denoising", "pair-flips", "generalization"])
    def test_the_table_marks_the_b_that_is_compared(self, name):
        """The b that held-out images prefer diverged in one trial, so another is compared."""
        best = {"generalization": 0.02, "pair-flips": 0.03}.get(name, 0.05)

        def change(run):
            lost = run.b == best and run.seed == 0
            held_out = {0.0: 0.5, best: 0.9}.get(run.b, 0.8 - run.b)
            return {"held_out": held_out, "status": "diverged" if lost else "finished"}

        verdict, table = checked(name, change)
        words = [str(c) for row in table.rows for c in row if "(chosen)" in str(c)]
        marked = {w.removesuffix(" (chosen)").rpartition(" ")[2] for w in words}
        named = [c.name.rpartition(", b = ")[2] for c in verdict.cases if ", b = " in c.name]
        assert marked == {b for bs in named for b in bs.split(" against ")}
        assert f"{best:g}" not in marked

    def test_unequal_numbers_of_trials_do_not_choose(self):
        """Later trials are easier, and only the first b has them."""
        few = trials((0.5, 0.5), (0.5, 0.4), (0.6, 0.45), seeds=range(3))
        more = trials((0.5, 0.5), (0.5, 0.9), seeds=range(3, 10))
        noisy = [r for r in (*few, *more) if r.run.b]
        case = compare("A", noisy, matching([*few, *more], b=0), "test_accuracy")
        assert case.name == "A, b = 2"

    def test_some_b_have_no_trials_for_choosing(self):
        """The first b would be chosen without a rival."""
        results = trials((0.5, 0.5), (0.7, 0.1), (0.9, 0.9))
        for tried in ((1,), (2,), (1, 2)):
            lines = [
                r
                for r in trials((0.5, 0.5), (0.7, 0.1), (0.9, 0.9), seeds=(1000, 1001))
                if r.run.b in tried
            ]
            noisy = [r for r in (*results, *lines) if r.run.b]
            case = compare("A", noisy, matching(results, b=0), "test_accuracy")
            assert case.word == ("better" if len(tried) == 2 else "no b was chosen")

    def lost(self, results, *pairs):
        return [
            dataclasses.replace(r, line=r.line | {"status": "diverged", "last": {}})
            if (r.run.b, r.run.seed) in pairs
            else r
            for r in results
        ]

    def test_each_b_diverged_in_another_trial(self):
        """Seed 0 is easier, and only the first b has finished it."""
        results = trials((0.5, 0.5), (0.6, 0.6), (0.7, 0.7))
        for r in results:
            r.line["last"]["held_out_accuracy"] += 0.9 if r.run.seed == 0 else 0.0
        case = compare("A", self.lost(results[FIVE:], (2, 0), (1, 1)), results[:FIVE], "loss")
        assert case.name == "A, b = 2"
        few = [r for r in results if r.run.seed < 2]
        noisy = self.lost([r for r in few if r.run.b], (2, 0), (1, 1))
        case = compare("A", noisy, matching(few, b=0), "test_accuracy")
        assert case.word == "no b was chosen"

    def test_two_settings_in_one(self):
        """Which of them counted would depend on the order of the lines."""
        results = trials((0.5, 0.5), (0.7, 0.7))
        other = result(Training(data="x", b=1, seed=3, held_out=1, lr=0.3), 0.9)
        for mixed in ([other, *results], [*results, other]):
            with pytest.raises(ValueError, match="seed 3 and b = 1, but differ in lr; compare one"):
                compare("A", [r for r in mixed if r.run.b], results[:FIVE], "test_accuracy")


class TestNothingToCompare:
    """A case without a pair of trials stays undecided; the others do not decide alone."""

    def test_the_chosen_b_was_not_judged(self):
        results = trials((0.5, 0.5), (0.7, 0.1))
        results += trials((0.5, 0.5), (0.1, 0.1), (0.9, 0.9), seeds=(1000, 1001))
        noisy, plain = [r for r in results if r.run.b], matching(results, b=0)
        case = compare("B", noisy, plain, "test_accuracy")
        assert (case.name, case.word, case.outcome()) == ("B, b = 2", "nothing to compare",
                                                          "undecided")  # fmt: skip
        verdict = judge("Gain", [Case("A", (0.1, 0.11, 0.1, 0.11, 0.1)), case])
        assert verdict.outcome == "undecided"
        assert verdict.preliminary
        assert verdict.because == "Gain: better in 1 case, nothing to compare in 1."
        assert ">  nothing to compare</text>" in figures.page_forest(verdict, "x")

    def test_other_seeds(self):
        results = trials((0.5, 0.5)) + trials((0.5, 0.5), (0.7, 0.5), seeds=range(5, 10))[FIVE:]
        noisy, plain = [r for r in results if r.run.b], matching(results, b=0)
        assert compare("A", noisy, plain, "test_accuracy").word == "nothing to compare"

    def test_one_trial(self):
        results = trials((0.5, 0.5), (0.9, 0.9), seeds=[0])
        case = compare("A", results[1:], results[:1], "test_accuracy")
        assert (case.outcome(), case.word) == ("undecided", "no significant difference")
        case = compare("A", self.diverged(results[1:]), results[:1], "test_accuracy")
        assert (case.outcome(), case.word, case.lost) == ("undecided", "diverged", 1)

    def diverged(self, results):
        return [result(r.run, 0, status="diverged") for r in results]


def recorded(name, scale, trials=0, **options):
    """Lines by key, of results in which NVRM is ahead."""
    lines = {}
    for run in EXPERIMENTS[name].runs(scale, trials):
        line = result(run, nvrm_ahead(run), **options).line
        lines[run.key] = {"key": run.key, "run": as_dict(run)} | line
    return lines


def found(name, scale, lines):
    (claim,) = report.gather_claims({scale: lines}, [EXPERIMENTS[name]], [scale])
    return claim.findings[0]


class TestPreliminary:
    """6 and 7: no verdict before its time, and none at the smoke scale."""

    def test_all_planned_trials(self):
        whole = recorded("forgetting", "paper")
        finding = found("forgetting", "paper", whole)
        assert (finding.status, finding.n) == ("true", "10")
        some = dict(list(whole.items())[:-1])
        finding = found("forgetting", "paper", some)
        assert finding.status == "preliminary-true"
        assert VERDICTS[finding.status] == ("(✓)", "preliminary: holds so far")

    def test_fewer_than_five_trials(self):
        assert found("forgetting", "cpu", recorded("forgetting", "cpu")).planned == 3 * 9
        statuses = {
            n: found("forgetting", "cpu", recorded("forgetting", "cpu", n)).status
            for n in (3, 4, 5)
        }
        assert statuses == {3: "preliminary-true", 4: "preliminary-true", 5: "true"}
        assert judge("", [Case("A", (0.1, 0.11, 0.1, 0.11))]).preliminary
        assert not judge("", [Case("A", (0.1, 0.11, 0.1, 0.11, 0.1))]).preliminary

    @pytest.mark.parametrize("name", list(EXPERIMENTS))
    def test_smoke(self, name, tmp_path):
        finding = found(name, "smoke", recorded(name, "smoke", FIVE))
        assert finding.verdict is None
        claims = (report.Claim(finding.experiment, (finding,)),)
        assert "numbers only" in report.summary_markdown(claims)
        assert finding.table.rows
        if name == "forgetting":  # drawing is slow
            written = report.write(claims, tmp_path)
            page = written.page.read_text()
            assert "holds" not in page.partition("<body>")[2]
            assert "better in" not in page
            assert [p.name for p in written.figures if "verdict" in p.name] == []


def without(line, name):
    return {key: value for key, value in line.items() if key != name}


def nulled(line, part):
    changed = json.loads(json.dumps(line))
    values = changed[part]["test_accuracy"]
    changed[part]["test_accuracy"] = None if part == "last" else [None, *values[1:]]
    return changed


DAMAGE = {
    "no curves": (lambda line: without(line, "curves"), "'curves' is missing"),
    "no last": (lambda line: without(line, "last"), "'last' is missing"),
    "last is null": (lambda line: line | {"last": None}, "NoneType"),
    "no under_noise": (lambda line: without(line, "under_noise"), "'under_noise' is missing"),
    "under_noise is null": (lambda line: line | {"under_noise": None}, "NoneType"),
    "no reestimated": (lambda line: without(line, "reestimated"), "'reestimated' is missing"),
    "null accuracy": (lambda line: nulled(line, "last"), "test_accuracy in 'last' is null"),
    "words in a curve": (
        lambda line: line | {"curves": line["curves"] | {"test_accuracy": ["high"]}},
        "test_accuracy in 'curves' is not a number",
    ),
    "a list of accuracies": (
        lambda line: line | {"last": line["last"] | {"test_accuracy": [[0.5]]}},
        "test_accuracy in 'last' is not a number",
    ),
    "unknown status": (lambda line: line | {"status": "killed"}, "the status is 'killed'"),
    "null in a curve": (lambda line: nulled(line, "curves"), "test_accuracy in 'curves' is null"),
    "null under noise": (lambda line: nulled(line, "under_noise"), "in 'under_noise' is null"),
    "unknown field": (
        lambda line: line | {"run": line["run"] | {"colour": "red"}},
        "a run has no field 'colour'",
    ),
}


class TestBrokenLines:
    """8: what is broken is said, and the rest is shown."""

    def told(self, tmp_path, capsys, damages):
        lines = list(recorded("robustness", "cpu", FIVE).values())
        for place, damage in damages.items():
            lines[place] = DAMAGE[damage][0](lines[place])
        (tmp_path / "results").mkdir()
        file = tmp_path / "results" / "cpu.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        out = tmp_path / "page"
        names = ["robustness", "generalization"]
        code = main(["report", *names, f"--results={file.parent}", f"--out={out}"])
        said = capsys.readouterr()
        assert code == 0
        rows = said.out.splitlines()[1:3]
        assert all("preliminary: " in row and "better in" in row for row in rows)
        assert "Traceback" not in said.err
        return file, said.err.splitlines(), (out / "index.html").read_text(), len(lines)

    def test_each_of_them(self, tmp_path, capsys):
        # Both experiments have the networks after the two runs of ResNet in each trial.
        both = [k for k in range(7 * FIVE) if k % 7 > 1]
        places = dict(zip(both, DAMAGE, strict=False))
        assert len(places) == len(DAMAGE)
        file, said, page, count = self.told(tmp_path, capsys, places)
        assert len(said) == len(DAMAGE)
        for place, damage in places.items():
            (sentence,) = [s for s in said if f"{file}, line {place + 1} is broken: " in s]
            assert DAMAGE[damage][1] in sentence
            assert f"{file}, line {place + 1} is broken" in page
        # Each experiment leaves out what it cannot use: robustness needs no curves.
        assert f"{count - len(DAMAGE) + 2} runs (" in page

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_one_alone(self, damage):
        name = "robustness" if "noise" in damage else "generalization"
        lines = recorded(name, "cpu", FIVE)
        key = list(lines)[3]
        lines[key] = DAMAGE[damage][0](lines[key])
        with pytest.warns(UserWarning, match=f"run {key} is broken: .*") as told:
            finding = found(name, "cpu", lines)
        assert len(told) == 1
        assert len(finding.results) == len(lines) - 1
        assert len(finding.broken) == 1

    @pytest.mark.parametrize("status", ["finished", "diverged"])
    @pytest.mark.parametrize("value", [None, "x", -1, True, [None], {"a": None}])
    def test_a_strange_origin_is_shown(self, value, status):
        lines = recorded("split", "cpu", 2, status=status)
        fields = ("seconds", "commit", "versions", "machine", "when", "device", "threads", "reason")
        for line in list(lines.values())[:2]:
            line |= dict.fromkeys(fields, value)
        claims = report.gather_claims({"cpu": lines}, [EXPERIMENTS["split"]], ["cpu"])
        assert claims[0].findings[0].broken == ()
        assert "4c" in documents.report_markdown(claims)

    def test_an_infinite_loss_in_a_table_of_ones_own(self):
        """It is recorded as null, and has no deviation."""
        lines = recorded("split", "cpu", 2)
        for line in lines.values():
            line["last"]["loss"] = None
        own = dataclasses.replace(
            EXPERIMENTS["split"],
            table=lambda r: make_table(("method",), [(("all",), r)], {"loss": last("loss")}),
        )
        (claim,) = report.gather_claims({"cpu": lines}, [own], ["cpu"])
        assert "nan ± nan" in documents.table_markdown(claim.findings[0].table)

    def test_an_error_of_a_users_file_is_not_a_broken_line(self):
        own = dataclasses.replace(
            EXPERIMENTS["split"],
            file=report.gather_claims.__globals__["Experiment"],
            table=lambda r: 1 / 0,
        )
        with pytest.raises(ZeroDivisionError):
            report.gather_claims({"cpu": recorded("split", "cpu")}, [own])


class TestSharpness:
    """9: ratios, so that no scale of noise dominates."""

    def verdict(self, rise):
        results = []
        for run in EXPERIMENTS["robustness"].runs("cpu", FIVE):
            one = result(run, nvrm_ahead(run))
            rises = [rise(run, k) for k in range(len(run.eval_noise))]
            one.line["under_noise"]["expected_sharpness"] = rises
            results.append(one)
        return EXPERIMENTS["robustness"].check(results)

    def test_each_scale_counts_the_same(self):
        """The rise grows by a factor of 30 from scale to scale, and NVRM halves it."""

        def rise(run, k):
            by_trial = 3.0**run.seed if k == 5 else 1.0  # varies at the largest scale only
            return 30.0**k * by_trial / (2.0 + 0.1 * run.seed if run.b else 1.0)

        cases = [str(c) for c in self.verdict(rise).cases if "sharpness" in c.name]
        assert len(cases) == 3
        for case in cases:
            assert ": 2.20 times lower (95 % interval 2.01 to 2.40, n = 5)" in case

    def test_against_the_claim(self):
        verdict = self.verdict(lambda run, k: (2.3 + 0.01 * run.seed) if run.b else 1.0)
        assert verdict.outcome == "false"
        assert "2.32 times higher (95 % interval 2.30 to 2.34, n = 5)" in str(verdict.cases[1])

    def test_a_rise_that_has_no_logarithm(self):
        verdict = self.verdict(
            lambda run, k: -0.1 if run.seed == 0 and run.b and k == 0 else (0.5 if run.b else 1.0)
        )
        case = verdict.cases[1]
        assert str(case).endswith("n = 4, 1 diverged or without a finite, positive value)")
        assert case.outcome() == verdict.outcome == "undecided"
        assert "diverged in 3" in verdict.because


def test_a_forest_plot_shows_every_case():
    verdict, _ = checked("pair-flips", diverged(lambda r: r.b == 0.05 and r.noise_rate == 0.1))
    svg = figures.page_forest(verdict, "x")
    for case in verdict.cases:
        assert f">{case.name.replace(' = ', figures.NAMED)}</text>" in svg
    assert svg.count("var(--green)") >= 2 * 8
    assert svg.count("> diverged</text>") + svg.count(">  diverged</text>") == 2


@pytest.mark.parametrize(
    "case",
    [
        Case("A", (0.1,)),
        Case("A", (0.0, 0.0)),
        Case("A", (), 3),
        Case("A", (), choice="no b was chosen"),
        Case("A", (0.1, 0.2), percent=False),
        Case("A $x_1$ " * 30, (-3.0, 4.0), ratio=True),
        Case("A", (-9.0, -10.0), ratio=True, lower=True),
        Case("A", (0.001, 0.0011), ratio=True, judged=False),
    ],
)
def test_forest_plots_draw_whatever_comes(case):
    verdict = judge("", [case, Case("B", (0.1, 0.11))])
    assert b"<svg" in figures.pictures(verdict, ["svg"])["svg"]
    assert figures.page_forest(verdict, "x").startswith("<svg")
