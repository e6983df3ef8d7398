"""Reports: the right runs under the right claim, exact numbers, safe text, whole files."""

import base64
import builtins
import hashlib
import itertools
import os
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from neuvar import pages, report
from neuvar._atomic import write_files
from neuvar.engine import Results
from neuvar.experiments import ExperimentFile
from neuvar.experiments.findings import Cell, Line, Panel, Result, Table, Verdict
from neuvar.pages import printable
from neuvar.report import figures
from neuvar.report.documents import diverged_runs, number, provenance, report_page, total_time
from neuvar.report.figures import band, caption, description, spread, y_limits
from neuvar.report.gather import SCALE_ORDER
from tests.test_report_examples import HOSTILE, OWN_TRIALS, claims, recorded, results

matplotlib = pytest.importorskip("matplotlib")


def named(name):
    return next(e for e in claims() if e.name == name)


def lines(experiment, scale="cpu", trials=0):
    return {run.key: recorded(run) for run in experiment.runs(scale, trials)}


def found(name, scale="cpu", trials=0):
    e = named(name)
    (claim,) = report.gather_claims({scale: lines(e, scale, trials)}, [e])
    return claim.findings[0]


def panel(*rows, label="SGD", x=None, role="plain", **options):
    x = tuple(range(len(rows[0]))) if x is None else x
    return Panel("title", "x", "y", (Line(label, x, rows, role),), **options)


class TestGather:
    def test_runs_are_found_by_key_alone_and_in_the_experiment_s_order(self):
        e = named("pair-flips")
        mine = lines(e)
        shuffled = dict(reversed([*lines(named("ewc")).items(), *mine.items()]))
        (claim,) = report.gather_claims({"cpu": shuffled}, [e])
        assert [r.run for r in claim.findings[0].results] == e.runs("cpu", 0)
        assert all(r.line is shuffled[r.run.key] for r in claim.findings[0].results)

    def test_what_is_missing_is_counted(self):
        e = named("pair-flips")
        some = dict(list(lines(e).items())[:12])
        finding = report.gather_claims({"cpu": some}, [e])[0].findings[0]
        assert (finding.recorded, finding.planned) == (12, 24)
        assert finding.tally == "12 of 24 runs"
        assert finding.n == "1–2"
        assert finding.command == "neuvar run pair-flips --scale cpu"

    def test_a_setting_without_any_run_has_n_0(self):
        e = named("pair-flips")
        some = {k: v for k, v in lines(e).items() if v["run"]["noise_rate"] < 0.4}
        assert report.gather_claims({"cpu": some}, [e])[0].findings[0].trials == (0, 3)

    def test_a_setting_with_one_trial_leaves_a_claim_undecided(self):
        e = replace(named("ewc"), check=lambda results: Verdict("true", "Better."))
        short = "1 of 2 settings have fewer than two trials yet."
        for trials, verdict in (
            (2, Verdict("true", "Better.", preliminary=True)),
            (1, Verdict("undecided", f"{short} Better.", preliminary=True)),
        ):
            some = {
                key: line
                for key, line in lines(e).items()
                if line["run"]["b"] == 0 or line["run"]["seed"] < trials
            }
            assert report.gather_claims({"cpu": some}, [e])[0].findings[0].verdict == verdict

    def test_further_trials_are_found_and_the_command_asks_for_them(self):
        finding = found("forgetting", trials=7)
        assert finding.tally == "21 runs (9 planned, 12 extra trials)"
        assert finding.n == "7"
        assert finding.command == "neuvar run forgetting --scale cpu --trials 7"

    def test_diverged_runs_are_counted_but_are_no_trials(self):
        finding = found("gradient-noise")
        assert finding.tally == "18 of 18 runs, 2 diverged"
        assert finding.trials == (1, 3)
        assert {(r.run.lr, r.run.b, r.run.seed) for r in finding.diverged} == {(3, 0, 0), (3, 0, 2)}

    def test_scales(self):
        e = named("ewc")
        every = {scale: lines(e, scale) for scale in OWN_TRIALS}
        # The smoke runs have the keys of the first trial of every scale here.
        shown = lambda have, asked=(): [  # noqa: E731
            finding.scale
            for claim in report.gather_claims({s: every[s] for s in have}, [e], asked)
            for finding in claim.findings
        ]
        assert shown(["smoke", "cpu", "paper"]) == ["paper", "cpu"]
        assert shown(["smoke"]) == ["smoke"]
        assert shown(["smoke", "cpu"]) == ["cpu"]
        assert shown(["smoke", "cpu"], ["smoke"]) == ["smoke"]
        assert shown(["smoke", "cpu"], ["paper"]) == []
        assert set(SCALE_ORDER) == set(OWN_TRIALS)

    def test_smoke_is_not_shown_for_one_claim_when_another_has_more(self):
        first, second = named("ewc"), named("split")
        have = {"cpu": lines(first), "smoke": lines(second, "smoke")}
        assert [len(c.findings) for c in report.gather_claims(have, [first, second])] == [1, 0]

    def test_unknown_scale_is_refused(self):
        with pytest.raises(ValueError, match="scales must be one of smoke, cpu, paper, got 'gpu'"):
            report.gather_claims({}, claims(), ["gpu"])
        with pytest.raises(ValueError, match="got 'gpu'"):
            report.gather_claims({"gpu": {}}, claims())

    def test_files_are_read_by_their_scale(self, tmp_path):
        e = named("ewc")
        for line in lines(e).values():
            Results(tmp_path / "cpu.jsonl").add(line)
        loaded = report.load([tmp_path / "cpu.jsonl", tmp_path / "paper.jsonl"])
        assert loaded == {"cpu": lines(e)}
        with pytest.raises(ValueError, match=r"named after a scale .* got '.*other.jsonl'"):
            report.load([tmp_path / "other.jsonl"])


class TestNumbers:
    def test_spread_is_mean_and_sample_deviation(self):
        rows = ((0.1, 0.5), (0.3, 0.6), (0.8, 0.1))
        mean, deviation, n = spread(Line("", (1, 2), rows))
        for i, column in enumerate(zip(*rows, strict=True)):
            assert mean[i] == pytest.approx(statistics.fmean(column))
            assert deviation[i] == pytest.approx(statistics.stdev(column))
        assert n.tolist() == [3, 3]

    def test_spread_takes_trials_as_far_as_they_got(self):
        rows = ((1.0, 2.0, 3.0, 4.0), (3.0, None), (5.0, float("nan"), float("inf")))
        mean, deviation, n = spread(Line("", (0, 1, 2), rows))
        assert n.tolist() == [3, 1, 1]
        assert mean.tolist() == [3.0, 2.0, 3.0]
        assert deviation[0] == pytest.approx(2.0)
        assert np.isnan(deviation[1:]).all()

    def test_spread_without_trials(self):
        mean, _, n = spread(Line("", (0, 1), ()))
        assert np.isnan(mean).all()
        assert n.tolist() == [0, 0]

    @pytest.mark.parametrize(
        ("cell", "value"),
        [
            (Cell((0.2, 0.4)), 0.3),
            (Cell(()), None),
            ("−3.5 %", -3.5),
            ("0.05", 0.05),
            ("1,024", 1024.0),
            ("nan", None),
            ("2–3", None),
            ("", None),
        ],
    )
    def test_number(self, cell, value):
        assert number(cell) == (None if value is None else pytest.approx(value))

    def test_caption_tells_n(self):
        three = panel((0.1, 0.2), (0.2, 0.3), (0.3, 0.4))
        assert caption([three]) == (
            "Lines are means, bands ± one standard deviation, over n = 3 trials."
        )
        assert "n = 1 to 3" in caption([three, panel((0.1, 0.2))])
        assert "single trials (n = 1)" in caption([panel((0.1, 0.2))])
        assert caption([Panel("", "", "", ())]) == ("No run of this figure has finished.")

    def test_description_says_where_lines_begin_and_end(self):
        said = description(panel((0.125, 0.2, 0.5), x=(1, 2, 30)))
        assert said == "y against x. SGD: 12.5 % at 1, 50.0 % at 30."

    def test_duration_has_the_unit_that_suits(self):
        assert [total_time([{"seconds": s}]) for s in (0, 59, 60, 3599, 3600, 86400, 172800)] == [
            "0 s", "59 s", "1.0 min", "60.0 min", "1.0 h", "24.0 h", "2.0 days",
        ]  # fmt: skip

    def test_facts_add_up_and_name_each_thing_once(self):
        said = dict(provenance(found("ewc").results))
        assert said["Time"] == "9.8 min"
        assert said["Dates"] == "2026-03-01 to 2026-03-03"
        assert said["Machine"] == "cores 2, cpu a laptop"
        assert said["torch"] == "2.13.0"
        assert said["Commit"] == "da0b3d31f00d"
        assert said["Precision"] == "float32"
        assert "Compile" not in said

    def test_facts_of_lines_that_lack_them(self):
        (run,) = named("ewc").runs("cpu", 1)[:1]
        assert provenance([Result(run, {"status": "finished"})]) == [("Time", "0 s")]

    def test_mishaps_name_what_sets_a_run_apart(self):
        finding = found("gradient-noise")
        said = diverged_runs(finding.diverged, finding.results)
        assert said == [
            (f"lr = 3, b = 0, seed = {seed}", "the loss was nan in epoch 5") for seed in (0, 2)
        ]


class TestTables:
    def test_numbers_stand_to_the_right_and_pipes_are_escaped(self):
        table = Table(("b", "a|b", "n"), (("0.05", "x|<y>", "3"), ("none", Cell(()), "–")))
        assert report.table_markdown(table) == (
            "| b | a\\|b | n |\n| --- | --- | ---: |\n"
            "| 0.05 | x\\|&lt;y&gt; | 3 |\n| none | – | – |"
        )

    def test_summary_has_a_row_for_each_claim_and_scale(self):
        text = report.summary_markdown(report.gather_claims(results(), claims()))
        rows = text.splitlines()
        assert len(rows) == 2 + 7
        assert rows[2] == "| 1 | Robustness to weight noise | ✓ holds | paper | 5 | 15 of 15 runs |"
        so_far = "| (✓) preliminary: holds so far | cpu | 2–3 | 20 of 24 runs |"
        assert rows[4].endswith(so_far)
        assert rows[6].split(" | ")[2] == "(✗) preliminary: does not hold so far"
        assert rows[7] == "| 4c | Tasks with heads of their own | – not run | – | – | – |"
        assert rows[8].split(" | ")[2] == "(?) preliminary: undecided so far"

    def test_report_has_all_of_a_claim(self):
        text = report.report_markdown(report.gather_claims(results(), claims()))
        for needed in (
            "## 4b. Elastic weight consolidation with variability",
            "> NVRM and EWC together are better than EWC alone.",
            "(✗) **preliminary: does not hold so far**: Gain: worse in 1 case.\n\n",
            "](figures/ewc-cpu-verdict.svg)",
            "| comparison | difference | 95 % interval | n | diverged | result |",
            f"| all | {found('ewc').verdict.cases[0].numbers[0]} |",
            "](figures/ewc-cpu.svg)",
            "| method | last epoch | best epoch | n |",
            "n = 3 trials per setting; 6 of 6 runs, cpu scale.",
            "10,000 images instead of 50,000",
            "```sh\nneuvar run ewc --scale cpu\n```",
            "No results yet: `neuvar run split --scale cpu`",
            "- lr = 3, b = 0, seed = 2: the loss was nan in epoch 5",
            "torch: 2.13.0",
        ):
            assert needed in text
        links = set(re.findall(r"\]\(#([^)]*)\)", text))
        assert links
        assert links <= set(re.findall(r'<a id="([^"]*)">', text))

    def test_a_claim_without_number_and_source(self):
        e = replace(
            named("ewc"), number="", source="", name="mine", file=ExperimentFile("my file.py", "")
        )
        text = report.report_markdown(report.gather_claims({"cpu": lines(e)}, [e]))
        assert "\n## Elastic weight consolidation with variability\n\n> NVRM and EWC" in text
        assert "\n>\n" not in text
        assert "```sh\nneuvar run 'my file.py' --scale cpu\n```" in text

    def test_the_page_of_an_own_experiment_does_not_speak_of_the_paper(self):
        paper = named("ewc")
        own = replace(paper, number="", source="", name="mine")
        pages = [report_page(report.gather_claims({"cpu": lines(e)}, [e])) for e in (paper, own)]
        assert ["The paper claims" in text for text in pages] == [True, False]
        assert ["Z. Xie et al." in text for text in pages] == [True, False]


class TestDocuments:
    def gathered(self):
        return report.gather_claims({"cpu": lines(named("ewc"))}, [named("ewc"), named("split")])

    def test_only_what_is_between_markers_changes(self, tmp_path):
        path, finding = tmp_path / "a.md", self.gathered()[0].findings[0]
        before = (
            "# x\n\n<!-- begin results ewc cpu -->old<!-- end results ewc cpu -->\ny\n"
            "<!-- begin verdict ewc cpu -->\n<!-- end verdict ewc cpu -->\n"
            "<!-- begin results split paper -->\n<!-- end results split paper -->\n"
            "<!-- begin verdicts -->\n<!-- end verdicts -->\nz"
        )
        path.write_text(before)
        assert report.insert(path, self.gathered())
        after = path.read_text()
        assert report.table_markdown(finding.table) in after
        assert "n = 3 trials per setting; 6 of 6 runs" in after
        assert (
            "(✗) **preliminary: does not hold so far**: Gain: worse in 1 case.\n<!-- end" in after
        )
        assert "No results yet: `neuvar run split --scale paper`" in after
        assert report.summary_markdown(self.gathered()) in after
        between = re.compile(r"(<!-- begin (.*?) -->).*?(<!-- end)", re.S)
        assert between.sub(r"\1\3", after) == between.sub(r"\1\3", before)

    def test_settings_and_figure(self, tmp_path):
        path, finding = tmp_path / "docs" / "a.md", self.gathered()[0].findings[0]
        path.parent.mkdir()
        text = "".join(
            f"<!-- begin {what} {name} {scale} --><!-- end {what} {name} {scale} -->\n"
            for what in ("settings", "figure", "verdict")
            for name, scale in (("ewc", "cpu"), ("split", "paper"))
        )
        path.write_text(text)
        with pytest.raises(ValueError, match="figures is not given"):
            report.insert(path, self.gathered())
        assert path.read_text() == text
        assert report.insert(path, self.gathered(), figures=tmp_path / "report" / "figures")
        after = path.read_text()
        assert "(../report/figures/ewc-cpu.svg)" in after
        assert "(../report/figures/ewc-cpu-verdict.svg)" in after
        assert f"```sh\n{finding.command}\n```" in after
        assert "Time for all runs in sequence: " in after
        assert "No results yet" not in after  # the marker for results says it

    def test_a_document_that_is_up_to_date_is_left_alone(self, tmp_path):
        path = tmp_path / "a.md"
        path.write_text("<!-- begin verdicts -->\n<!-- end verdicts -->\n")
        assert report.insert(path, self.gathered())
        os.utime(path, (1, 1))
        assert not report.insert(path, self.gathered())
        assert path.stat().st_mtime == 1

    def test_line_ends_mode_and_link_stay(self, tmp_path):
        path, link = tmp_path / "a.md", tmp_path / "link.md"
        path.write_bytes("é\r\n<!-- begin verdicts -->\r\n<!-- end verdicts -->\r\n".encode())
        path.chmod(0o600)
        link.symlink_to(path)
        assert report.insert(link, self.gathered())
        assert link.is_symlink()
        assert path.stat().st_mode & 0o777 == 0o600
        assert b"\n" not in path.read_bytes().replace(b"\r\n", b"")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("<!-- begin foo --><!-- end foo -->", r"'foo'; known are verdicts, .* ewc, split "),
            ("<!-- begin results foo cpu --><!-- end results foo cpu -->", "one of ewc, split"),
            ("<!-- begin results ewc gpu --><!-- end results ewc gpu -->", "smoke, cpu, paper"),
            ("<!-- begin verdicts -->", "without its other half: <!-- begin verdicts -->"),
            ("<!-- end verdicts -->", "without its other half: <!-- end verdicts -->"),
            ("<!-- begin verdicts --><!-- end other -->", "other half: <!-- begin verdicts"),
            ("<!-- begin a --><!-- begin b --><!-- end b --><!-- end a -->", "other half"),
        ],
    )
    def test_markers_that_are_wrong(self, tmp_path, text, message):
        path = tmp_path / "a.md"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            report.insert(path, self.gathered())
        assert path.read_text() == text


class TestFigures:
    def test_colour_by_role_dashes_and_marker_by_order(self):
        rows = (("SGD", "plain"), ("b = 0.01", "nvrm"), ("b = 0.03", "nvrm"), ("SAM", "other"))
        one = Panel("", "", "", tuple(Line(a, (1,), ((1.0,),), r) for a, r in rows))
        looks = list(figures.styles([one, one]).values())
        assert [looks[i].colour for i in (0, 1, 3)] == ["#d55e00", "#0072b2", "#009e73"]
        assert looks[2].colour == figures.mixed("#0072b2", figures.INK, 0.65)
        assert len({(s.dashes, s.marker) for s in looks}) == 4
        assert looks[1].dashes != looks[2].dashes

    def test_a_value_of_b_has_the_same_look_in_every_figure(self):
        def looks(*bs):
            lines = tuple(Line(f"b = {b:g}", (1,), ((1.0,),), "nvrm", b) for b in bs)
            return figures.styles([Panel("", "", "", lines)])

        every, one = looks(0.05, 0.01, 0.02, 0.03, 0.07), looks(0.05)
        assert [label for label, _ in every] == [
            f"b = {b:g}" for b in (0.01, 0.02, 0.03, 0.05, 0.07)
        ]
        assert len(set(every.values())) == 5
        assert every["b = 0.05", "nvrm"] == one["b = 0.05", "nvrm"]
        assert len(set(looks(0.001, 0.002, 0.003, 0.004).values())) == 4
        axis = Line("NVRM (b on the x-axis)", (1,), ((1.0,),), "nvrm")
        some = Panel("", "", "", (axis, Line("b = 0.03", (1,), ((1.0,),), "nvrm", 0.03)))
        assert len(set(figures.styles([some]).values())) == 2

    def test_bands_end_where_values_are_possible(self):
        rows = ((0.9, 0.0), (1.0, 0.1), (1.0, 0.0))
        for signed in (False, True):
            shown = panel(*rows, signed=signed)
            low, high = band(shown.lines[0], shown)
            assert high[0] == 1.0
            assert (low[1] < 0) == signed

    @pytest.mark.parametrize(
        "values", [(0.4, 0.5), (0.41, 0.44), (0.2, 0.9), (1.1, 9.0), (0.003, 0.4), (0.02, 90.0)]
    )
    def test_a_logarithmic_axis_has_numbers(self, values):
        shown = panel(values, percent=False, log_y=True)
        with figures.plain_matplotlib("x"):
            axes = figures.make_figure([shown]).axes[0]
            low, high = axes.get_ylim()
            ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
        assert axes.get_yscale() == "log"
        assert 2 <= len(ticks) <= 9

    def test_a_logarithmic_axis_holds_bands_and_is_given_up_without_positive_means(self):
        rows = ((0.1, 30.0), (0.3, 1000.0), (0.2, 1.0))
        shown = panel(*rows, percent=False, log_y=True)
        ((low, high),) = y_limits([shown])
        assert 0 < low < 0.1
        assert high > 1000
        below, _ = band(shown.lines[0], shown)
        assert (below > 0).all()
        with figures.plain_matplotlib("x"):
            scales = [
                figures.make_figure([one]).axes[0].get_yscale()
                for one in (shown, panel((0.0, 1.0), percent=False, log_y=True))
            ]
        assert scales == ["log", "linear"]

    def test_panels_share_y_unless_one_would_be_flat(self):
        tall, taller, flat = panel((0.1, 0.5)), panel((0.2, 0.9)), panel((0.50, 0.52))
        assert len(set(y_limits([tall, taller]))) == 1
        limits = y_limits([tall, flat])
        assert limits[0] != limits[1]
        assert limits[1][0] < 0.50 < 0.52 < limits[1][1]
        other = replace(tall, y_label="loss")
        assert y_limits([other, taller])[0] == y_limits([other])[0]

    def test_limits_hold_the_band(self):
        rows = ((0.2, 0.4), (0.4, 0.6))
        (low, high), mean, half = (
            y_limits([panel(*rows)])[0],
            0.3,
            statistics.stdev((0.2, 0.4)),
        )
        assert low < mean - half
        assert high > 0.5 + half

    def test_bands_of_shares_end_at_one(self):
        (limits,) = y_limits([panel((1.0, 0.5), (0.9, 0.5), (1.0, 0.5))])
        assert limits[1] == pytest.approx(1 + 0.05 * (limits[1] - limits[0]) / 1.1)

    @pytest.mark.parametrize(
        "panels",
        [
            [panel((0.1, 0.2, 0.3), (0.2, 0.3, 0.4))] * 5,
            [panel((0.1,), (0.2,))],
            [panel((0.1, 0.2, 0.3), (0.2,), ())],
            [panel((0.1, 0.2), x=(0.0, 0.01), log_x=True)],
            [panel((0.1, 0.2, 0.2), x=(0.01, 0.1, 10), log_x=True)],
            [panel((float("nan"), float("nan")))],
            [Panel("empty", "x", "y", ())],
            [panel((1e9, -3e9), percent=False)],
            [panel((0.5, 0.5), (0.5, 0.5))],
            [panel((0.5, 0.6), label=HOSTILE.replace("\x00", "")), panel((0.5, 0.6), label="_")],
            [panel(tuple(np.linspace(0, 1, 300)), tuple(np.linspace(0, 0.9, 300)))],
        ],
        ids=range(11),
    )
    def test_draws_whatever_comes(self, tmp_path, panels):
        svg, png = (report.draw(panels, tmp_path / f"new/a.{kind}") for kind in ("svg", "png"))
        root = ElementTree.parse(svg).getroot()
        assert root.tag.endswith("svg")
        assert len(root.findall(".//*[@id='axes_1']")) == 1
        assert png.read_bytes().startswith(b"\x89PNG")

    def test_print_has_a_white_ground_and_enough_pixels(self, tmp_path):
        from matplotlib.image import imread

        pixels = imread(report.draw([panel((0.1, 0.2), (0.2, 0.3))], tmp_path / "a.png"))
        assert pixels[0, 0].tolist() == [1, 1, 1, 1]
        assert pixels.shape[1] >= 150 * 4
        assert figures.DPI >= 150

    def test_at_most_four_columns(self):
        with figures.plain_matplotlib("x"):
            for count in range(1, 14):
                figure = figures.make_figure([panel((0.1, 0.2))] * count)
                spec = figure.axes[0].get_subplotspec().get_gridspec()
                assert spec.ncols <= 4
                assert spec.nrows * spec.ncols - spec.ncols < count <= spec.nrows * spec.ncols
                assert len(figure.legends[0].get_texts()) == 1

    def test_band_is_one_deviation(self):
        rows = ((0.2, 0.4), (0.4, 0.6))
        with figures.plain_matplotlib("x"):
            axes = figures.make_figure([panel(*rows)]).axes[0]
        top = axes.collections[0].get_paths()[0].vertices[:, 1].max()
        assert top == pytest.approx(0.5 + statistics.stdev((0.4, 0.6)))
        assert axes.lines[0].get_ydata() == pytest.approx([0.3, 0.5])

    def test_one_trial_has_no_band(self):
        with figures.plain_matplotlib("x"):
            axes = figures.make_figure([panel((0.2, 0.4))]).axes[0]
        assert len(axes.collections) == 0

    def test_same_panels_same_bytes(self):
        panels = [panel((0.1, 0.2), (0.2, 0.3))]
        both = figures.pictures(panels)
        assert list(both) == ["svg", "png"]
        assert figures.pictures(panels) == both
        assert figures.pictures(panels, ["png"])["png"] == both["png"]

    def test_the_user_s_settings_neither_matter_nor_change(self):
        panels = [panel((0.1, 0.2), (0.2, 0.3))]
        plain = figures.pictures(panels)
        with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30}):
            before = dict(matplotlib.rcParams)
            assert figures.pictures(panels) == plain
            assert dict(matplotlib.rcParams) == before

    def test_bad_arguments(self, tmp_path):
        with pytest.raises(ValueError, match=r"path must end in .svg or .png, got '.*a.pdf'"):
            report.draw([panel((1.0,))], tmp_path / "a.pdf")
        with pytest.raises(ValueError, match="panels must hold at least one panel, got none"):
            report.draw([], tmp_path / "a.svg")
        assert list(tmp_path.iterdir()) == []

    def test_a_sentence_without_matplotlib(self, tmp_path, monkeypatch):
        def without(name, *arguments, **options):
            if name.startswith("matplotlib"):
                raise ImportError(name)
            return original(name, *arguments, **options)

        original = builtins.__import__
        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(ImportError, match=r'needs matplotlib: pip install "neuvar\[plot\]"'):
            report.draw([panel((1.0,))], tmp_path / "a.svg")

    def test_importing_the_report_imports_no_matplotlib_and_drawing_no_pyplot(self, tmp_path):
        code = f"""
import sys
from neuvar import report
from neuvar.experiments.findings import Line, Panel
assert "matplotlib" not in sys.modules
report.draw([Panel("", "", "", (Line("", (1, 2), ((1.0, 2.0),)),))], {str(tmp_path / "a.svg")!r})
assert "matplotlib" in sys.modules
assert "matplotlib.pyplot" not in sys.modules
"""
        subprocess.run([sys.executable, "-c", code], check=True)


class Page(HTMLParser):
    """Elements, names and links of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.links, self.handlers, self.inside = [], [], [], [], []
        self.headings = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href", "action"):
                self.links.append(value)
            if name.startswith("on"):
                self.handlers.append(name)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    gathered = report.gather_claims(results(), claims())
    return report.write(gathered, tmp_path_factory.mktemp("report"))


class TestPage:
    def test_files_are_those_that_it_names(self, written):
        out = written.page.parent
        there = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
        names = [f.name for claim in written.claims for f in claim.findings]
        assert len(names) == 6
        judged = [f.name for c in written.claims for f in c.findings if f.verdict.cases]
        assert len(judged) == 5
        assert there == {"index.html", "report.md"} | {
            f"figures/{name}.{kind}" for name in names for kind in ("svg", "png")
        } | {f"figures/{name}-verdict.svg" for name in judged}
        assert {p.relative_to(out).as_posix() for p in written.figures} < there

    def test_every_name_is_unique_and_every_link_leads_somewhere(self, written):
        page = Page(written.page.read_text())
        assert len(page.ids) == len(set(page.ids))
        for link in page.links:
            if link.startswith("#"):
                assert link[1:] in page.ids
            elif link != "data:,":
                assert (written.page.parent / link).is_file()
        for name in re.findall(r"url\(#([^)]*)\)", written.page.read_text()):
            assert name in page.ids

    def test_headings_are_in_order(self, written):
        headings = Page(written.page.read_text()).headings
        assert headings[0] == 1
        assert headings.count(1) == 1
        assert all(b <= a + 1 for a, b in itertools.pairwise(headings))

    def test_it_speaks_of_no_other_place(self, written):
        text = written.page.read_text()
        assert "http:" not in text
        assert "https:" not in text
        assert "default-src 'none'" in text
        assert "url(" not in text.replace("url(#", "")

    def test_script_is_the_only_one_that_may_run(self, written):
        script = re.search(r"<script>(.*?)</script>", written.page.read_text(), re.S)[1]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in written.page.read_text()

    def test_every_panel_has_a_title_and_a_description(self, written):
        page = Page(written.page.read_text())
        panels = sum(
            len(f.panels) + bool(f.verdict.cases) for c in written.claims for f in c.findings
        )
        assert page.tags.count("desc") == panels
        assert written.page.read_text().count('role="img"') == panels

    def test_colours_follow_the_page(self, written):
        text = written.page.read_text()
        body = text[text.index("<body>") :]
        assert "stroke: var(--plain)" in body
        assert "fill: currentColor" in body
        verdicts = (*figures.WORD_COLOURS.values(), figures.UNDECIDED)
        for colour in (*figures.COLOURS.values(), *verdicts, figures.INK, figures.GRID):
            assert colour not in body

    def test_it_says_all_that_a_reader_needs(self, written):
        text = written.page.read_text()
        for needed in (
            "20 of 24 runs",
            "18 of 18 runs, 2 diverged",
            "the loss was nan in epoch 5",
            "neuvar run split --scale cpu",
            "To run this experiment",
            "cores 2, cpu a laptop",
            "10,000 images instead of 50,000",
            "over n = 5 trials",
        ):
            assert needed in text

    def test_same_results_same_bytes(self, tmp_path):
        some = [named("ewc"), named("split")]
        have = {"cpu": lines(named("ewc"))}
        turned = {"cpu": dict(reversed(have["cpu"].items()))}
        first, second = (
            report.write(report.gather_claims(lines, some), tmp_path / name)
            for name, lines in (("a", have), ("b", turned))
        )
        for one in (first.page, first.markdown, *first.figures):
            other = tmp_path / "b" / one.relative_to(tmp_path / "a")
            assert one.read_bytes() == other.read_bytes()
        assert second.claims[0].findings[0].verdict == first.claims[0].findings[0].verdict

    def test_no_results_at_all(self, tmp_path):
        done = report.write(report.gather_claims({}, claims()), tmp_path)
        assert done.figures == ()
        assert "There are no results yet." in done.page.read_text()
        assert done.markdown.read_text().count("No results yet") == 6

    def test_hostile_words_stay_words(self, tmp_path):
        e = named("gradient-noise")
        have = {run.key: recorded(run, machine=HOSTILE) for run in e.runs("cpu", 1)}
        for line in have.values():
            line["reason"] = line["reason"] and HOSTILE
            line["commit"] = line["when"] = line["device"] = HOSTILE
        hostile = replace(
            e,
            number=HOSTILE,
            title=HOSTILE,
            sentence=HOSTILE,
            source=HOSTILE,
            settings=lambda scale: HOSTILE,
            panels=lambda results: [
                replace(
                    panel((0.1, 0.2), (0.2, 0.3), label=HOSTILE), title=HOSTILE, x_label=HOSTILE
                )
            ],
            table=lambda results: Table((HOSTILE, "n"), ((HOSTILE, HOSTILE),)),
            check=lambda results: Verdict("undecided", HOSTILE),
        )
        gathered = report.gather_claims({"cpu": have}, [hostile, named("split")])
        done = report.write(gathered, tmp_path)
        text = done.page.read_text()
        page = Page(text)
        assert page.tags.count("script") == 1
        assert "img" not in page.tags
        assert page.handlers == []
        assert "\x00" not in text
        assert "<script" not in done.markdown.read_text()
        assert "<img" not in done.markdown.read_text()
        for svg in tmp_path.glob("figures/*.svg"):
            ElementTree.parse(svg)

    def test_printable(self):
        assert printable("a\x00b\x1b\ud800c\td\n") == "a�b��c\td\n"


class TestFiles:
    def test_an_interrupted_report_leaves_the_old_one(self, tmp_path, monkeypatch):
        write_files({tmp_path / "a": b"old", tmp_path / "b": b"old"})
        real, calls = os.fsync, []

        def interrupted(number):
            calls.append(number)
            if len(calls) == 2:
                raise KeyboardInterrupt
            real(number)

        monkeypatch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_files({tmp_path / "a": b"new", tmp_path / "b": b"new"})
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a": b"old", "b": b"old"}

    def test_a_file_is_replaced_and_never_written_over(self, tmp_path):
        """Whoever still reads the old file, here by another name, reads all of it."""
        write_files({tmp_path / "a": b"old"})
        (tmp_path / "reader").hardlink_to(tmp_path / "a")
        write_files({tmp_path / "a": b"new"})
        assert (tmp_path / "reader").read_bytes() == b"old"
        assert (tmp_path / "a").read_bytes() == b"new"

    def test_a_failure_while_drawing_writes_nothing(self, tmp_path):
        def fails(results):
            raise RuntimeError("no")

        e = replace(named("ewc"), settings=fails)
        with pytest.raises(RuntimeError):
            report.write(report.gather_claims({"cpu": lines(e)}, [e]), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_folders_are_made(self, tmp_path):
        write_files({tmp_path / "x/y/z": b"1"})
        assert (tmp_path / "x/y/z").read_bytes() == b"1"


def test_parts_of_the_page_are_shipped():
    for package, name in ((report, "page"), (pages, "base")):
        folder = Path(package.__file__).parent
        assert all((folder / f"{name}.{kind}").is_file() for kind in ("html", "css", "js"))


def test_figures_that_have_no_results_any_more_are_removed(tmp_path):
    figures = tmp_path / "figures"
    report.write(report.gather_claims({"cpu": lines(named("ewc"))}, [named("ewc")]), tmp_path)
    (figures / "mine.svg").write_text("")
    assert (figures / "ewc-cpu.svg").exists()
    report.write(report.gather_claims({"cpu": {}}, [named("ewc")]), tmp_path)
    assert [path.name for path in figures.iterdir()] == ["mine.svg"]


def test_overview_holds_the_panels_that_ask_for_it(tmp_path):
    e = named("ewc")
    chosen = replace(e, panels=lambda found: [replace(e.panels(found)[0], overview=True)])
    done = report.write(report.gather_claims({"cpu": lines(e)}, [chosen]), tmp_path)
    overview = tmp_path / "figures" / "overview.png"
    assert overview in done.figures
    assert overview.read_bytes() == (tmp_path / "figures" / "ewc-cpu.png").read_bytes()
    report.write(report.gather_claims({"cpu": lines(e)}, [e]), tmp_path)
    assert not overview.exists()


@pytest.mark.parametrize(
    ("title", "label"),
    [("MNIST: test accuracy", ""), ("MNIST", "test accuracy"), ("", "test accuracy")],
)
def test_a_panel_says_once_what_it_shows(title, label):
    from matplotlib.figure import Figure

    from neuvar.experiments.findings import Panel

    axes = Figure().add_subplot()
    figures.plot(axes, Panel(title, "epoch", "test accuracy", ()), {}, (0, 1), 3)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epoch", label)
