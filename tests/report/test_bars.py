import math

from pronghorn.report.bars import STAGE_STYLES, share_bar, sparkline, stage_bar, stage_legend
from pronghorn.report.stages import STAGES


def test_sparkline_goes_from_high_to_low_and_survives_odd_values():
    assert sparkline([4, 3, 2, 1]) == "█▆▃▁"
    assert sparkline([2, 2, 2]) == "▁▁▁"
    assert sparkline([]) == sparkline([math.nan]) == ""
    assert sparkline([1, math.inf, 2]) == "▁█"
    assert len(sparkline(list(range(1000)), 24)) == 24


def test_share_bar():
    assert share_bar(0.5, 10) == "█████"
    assert share_bar(0.25, 10) == "██▌"
    assert share_bar(0, 10) == ""
    assert share_bar(7, 10) == "█" * 10


def test_stage_bar_is_as_wide_as_asked_and_in_proportion():
    bar = stage_bar({"step": 70.0, "wait": 20.0, "load": 10.0}, 40)
    assert len(bar.plain) == 40
    widths = {str(span.style): span.end - span.start for span in bar.spans}
    assert widths == {STAGE_STYLES["load"]: 4, STAGE_STYLES["wait"]: 8, STAGE_STYLES["step"]: 28}
    assert len(stage_bar({}, 12).plain) == 12
    assert len(stage_bar(dict.fromkeys(STAGES, 1.0), 37).plain) == 37


def test_every_stage_has_its_own_colour():
    assert set(STAGE_STYLES) == set(STAGES)
    assert len(set(STAGE_STYLES.values())) == len(STAGES)


def test_legend_names_the_largest():
    assert stage_legend({"step": 75.0, "wait": 20.0, "load": 5.0}, 2).plain == "step 75 %  wait 20 %"
