import itertools
import json
import math
import random
import re

from pronghorn.report.plots import MOST_POINTS, Plot, Scale, Series, as_json, draw, log_ticks, smooth, thin, tick_text, ticks


def test_thinning_keeps_peaks_ends_and_order():
    noise = random.Random(0)
    points = [(float(i), noise.random()) for i in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    points[77_777] = (77_777.0, -99.0)
    kept = thin(points)
    assert len(kept) <= MOST_POINTS
    assert len(kept) > MOST_POINTS * 0.9
    assert kept == sorted(kept)
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert {(54_321.0, 99.0), (77_777.0, -99.0)} <= set(kept)
    assert thin(points[:50]) == points[:50]


def test_smoothing_follows_a_straight_line_and_calms_noise():
    line = [(float(i), 3.0 - i) for i in range(100)]
    assert all(abs(a[1] - b[1]) < 1e-9 for a, b in zip(smooth(line, 10)[:90], line[:90], strict=True))
    noise = random.Random(0)
    noisy = [(float(i), noise.gauss(0, 1)) for i in range(5000)]
    assert max(abs(y) for _, y in smooth(noisy)[100:]) < 0.6
    assert smooth([(1.0, 2.0)]) == [(1.0, 2.0)]


def test_ticks_are_round_and_inside():
    assert ticks(0, 800, 4) == [0, 200, 400, 600, 800]
    assert [round(t, 6) for t in ticks(0.37, 0.62, 5)] == [0.4, 0.45, 0.5, 0.55, 0.6]
    assert ticks(3, 3) == [3]
    assert [tick_text(t) for t in (0, 0.5, 2e-4, 1500, 150_000, 2.5e6)] == ["0", "0.5", "2e-4", "1,500", "150k", "2.5M"]


def numbers_of(page):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', page).group(1))


def test_a_plot_carries_its_numbers_and_draws_inside_the_frame():
    points = [(float(i), math.sin(i)) for i in range(1, 50)]
    page = draw(Plot("Sine", [Series("sine", "train", points)], breaks=[(10.0, "here")], star=(3.0, 0.1, "best")))
    data = numbers_of(page)
    assert data["lines"][0]["x"] == list(range(1, 50))
    assert (data["x0"], data["x1"]) == (1, 49)
    path = re.search(r'class="line train" d="M([^"]+)"', page).group(1)
    pairs = [tuple(map(float, pair.split())) for pair in path.split("L")]
    assert len(pairs) == 49
    assert all(0 <= x <= 1000 and 0 <= y <= 1000 for x, y in pairs)
    assert "here" in page
    assert "best" in page


def test_one_point_no_point_and_points_that_are_not_finite():
    assert "no data yet" in draw(Plot("None", [Series("a", "train", [])]))
    assert "no data yet" in draw(Plot("Nan", [Series("a", "train", [(1.0, math.nan), (2.0, math.inf)])]))
    one = draw(Plot("One", [Series("a", "train", [(1.0, 0.0)])]))
    assert "nan" not in one
    assert 'class="dots train"' in one
    assert numbers_of(one)["x1"] > numbers_of(one)["x0"]


def test_one_spike_does_not_flatten_the_rest_and_is_told():
    points = [(float(i), 1.0 + (i % 10) / 10) for i in range(1000)]
    points[500] = (500.0, 1e6)
    page = draw(Plot("Spike", [Series("a", "train", points, "faint")]))
    assert "1 step is above the plotted range" in page
    assert re.search(r'class="y">.*?1\.5<', page)


def test_json_cannot_end_its_script():
    text = as_json({"name": "</script><script>alert(1)"})
    assert "<" not in text
    assert json.loads(text)["name"] == "</script><script>alert(1)"


def test_a_logarithmic_axis_has_equal_room_for_equal_ratios_and_round_ticks():
    scale = Scale(0, 1, 0.01, 1, log=True)
    assert math.isclose(scale.y(0.1), 0.5)
    assert scale.y(0) == scale.y(-1) == 0  # what has no logarithm lies on the lower edge
    assert [tick_text(t) for t in log_ticks(0.35, 3.6)] == ["0.5", "1", "2"]
    assert [tick_text(t) for t in log_ticks(0.0009, 12)] == ["0.001", "0.01", "0.1", "1", "10"]
    assert len(log_ticks(0.61, 0.66)) >= 3
    assert len(log_ticks(1e-30, 1e30)) < 12


def test_the_switch_is_there_only_where_a_logarithm_is():
    rising = [(float(i), 10.0**-i) for i in range(1, 5)]
    page = draw(Plot("Loss", [Series("a", "train", rising)], tall=True, log=True, unit="loss per token"))
    assert page.count('class="frame') == 2
    assert 'type="checkbox"' in page
    log_path = re.findall(r'class="line train" d="M([^"]+)"', page)[1]
    heights = [float(pair.split()[1]) for pair in log_path.split("L")]
    steps = [b - a for a, b in itertools.pairwise(heights)]
    assert max(steps) - min(steps) < 1
    flat = draw(Plot("Loss", [Series("a", "train", [(1.0, 0.0), (2.0, -1.0)])], tall=True, log=True))
    assert "checkbox" not in flat
    assert "checkbox" not in draw(Plot("Loss", [Series("a", "train", rising)], tall=True))
