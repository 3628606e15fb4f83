import json
import math
import random
import re

from pronghorn.report.plots import MOST_POINTS, Plot, Series, as_json, draw, thin


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
