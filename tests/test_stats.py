"""Statistics compared with closed forms and with naive loops."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import trim_mean

from isqn.analysis import stats
from isqn.types import UserError

RLIABLE = json.loads((Path(__file__).parent / "data" / "rliable.json").read_text())
STATISTICS = (stats.iqm, stats.median, stats.mean, stats.optimality_gap)


def random_scores(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.8, 1.0, shape)


# Naive statistics on lists of rows, one row for each seed.


def naive_iqm(rows):
    runs = sorted(score for row in rows for score in row)
    cut = int(0.25 * len(runs))
    return statistics.fmean(runs[cut : len(runs) - cut])


def naive_median(rows):
    return statistics.median(statistics.fmean(column) for column in zip(*rows, strict=True))


def naive_mean(rows):
    return statistics.fmean(statistics.fmean(column) for column in zip(*rows, strict=True))


def naive_optimality_gap(rows):
    return 1.0 - statistics.fmean(min(score, 1.0) for row in rows for score in row)


def naive_improvement(x, y):
    chances = []
    for left, right in zip(zip(*x, strict=True), zip(*y, strict=True), strict=True):
        wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a in left for b in right]
        chances.append(statistics.fmean(wins))
    return statistics.fmean(chances)


NAIVE = dict(zip(STATISTICS, (naive_iqm, naive_median, naive_mean, naive_optimality_gap), strict=True))


def naive_resample(scores, draw):
    """Replace seed i of task j by seed `draw[i][j]`."""
    return [[scores[draw[i][j]][j] for j in range(len(draw[i]))] for i in range(len(draw))]


def naive_quantile(values, q):
    """Return a quantile by linear interpolation between the two nearest values."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = min(int(position), len(ordered) - 2)
    return ordered[below] + (position - below) * (ordered[below + 1] - ordered[below])


# -- statistics


def test_iqm_trims_a_quarter_at_each_end():
    scores = np.arange(1.0, 9.0).reshape(4, 2)  # the mean is over 3, 4, 5, 6
    assert stats.iqm(scores) == 4.5
    scores[-1, -1] = 1e9
    assert stats.iqm(scores) == 4.5
    scores[0, 0] = -1e9
    assert stats.iqm(scores) == 4.5
    assert stats.iqm([[1.0], [2.0], [30.0]]) == 11.0  # a quarter of three runs is rounded down to none
    assert stats.iqm([[1.0], [2.0], [3.0], [4.0], [90.0]]) == 3.0  # a quarter of five is rounded down to one


def test_iqm_pools_the_runs_of_all_tasks():
    # sorted: 0 0 1 1 10 10 11 11; the middle four are 1 1 10 10
    assert stats.iqm([[0.0, 10.0], [1.0, 11.0], [0.0, 10.0], [1.0, 11.0]]) == 5.5


def test_median_and_mean_by_hand():
    scores = [[0.0, 10.0, 100.0], [2.0, 30.0, 300.0]]  # means of the tasks are 1, 20, 200
    assert stats.median(scores) == 20.0
    assert stats.mean(scores) == 221 / 3
    assert stats.median([[1.0, 2.0], [3.0, 6.0]]) == 3.0  # the median is halfway between 2 and 4


def test_optimality_gap_by_hand():
    scores = [[0.0, 0.5], [2.0, 1.0]]  # clipped to 0, 0.5, 1, 1
    assert stats.optimality_gap(scores) == 1 - 2.5 / 4
    assert stats.optimality_gap(scores, threshold=2.0) == 2 - 3.5 / 4
    assert stats.optimality_gap([[5.0, 7.0]]) == 0.0


def test_auc_sums_epochs():
    scores = np.array([[[1.0, 2.0, 4.0], [0.0, -1.0, 3.0]]])
    np.testing.assert_array_equal(stats.auc(scores), [[7.0, 2.0]])


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 6), (5, 7), (10, 4)])
def test_statistics_equal_naive_loops(statistic, shape):
    scores = random_scores(*shape)
    assert statistic(scores) == pytest.approx(NAIVE[statistic](scores.tolist()), abs=1e-12)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_axes_after_tasks_are_kept(statistic):
    scores = random_scores(5, 3, 4, 2)
    each = [[statistic(scores[:, :, i, j]) for j in range(2)] for i in range(4)]
    np.testing.assert_allclose(statistic(scores), each, atol=1e-12)


@pytest.mark.parametrize("runs", range(1, 14))
def test_iqm_equals_scipy_trimmed_mean(runs):
    scores = random_scores(runs, 3, seed=runs)
    assert stats.iqm(scores) == pytest.approx(trim_mean(scores.ravel(), 0.25), abs=1e-12)
    assert stats.iqm(scores[:, :1]) == pytest.approx(trim_mean(scores[:, 0], 0.25), abs=1e-12)


@pytest.mark.parametrize("name", RLIABLE["sets"])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_point_estimates_equal_those_of_rliable(statistic, name):
    of_rliable = RLIABLE["sets"][name]
    assert statistic(of_rliable["scores"]) == pytest.approx(of_rliable[statistic.__name__], abs=1e-12)


def test_the_probability_of_improvement_equals_that_of_rliable():
    """Some scores are equal, and count half."""
    x, y = (RLIABLE["sets"][name]["scores"] for name in "xy")
    ties = sum(
        a == b
        for of_x, of_y in zip(zip(*x, strict=True), zip(*y, strict=True), strict=True)
        for a in of_x
        for b in of_y
    )
    assert ties > 0
    expected = RLIABLE["probability_of_improvement"]
    assert stats.probability_of_improvement(x, y).point == pytest.approx(expected["x over y"], abs=1e-12)
    assert stats.probability_of_improvement(y, x).point == pytest.approx(expected["y over x"], abs=1e-12)


# -- bootstrap


def test_seeds_are_resampled_uniformly_and_independently_for_each_task():
    draws = stats.resample_seeds(np.random.default_rng(0), 6000, 3, 2)
    assert draws.shape == (6000, 3, 2)
    deviation = np.sqrt(6000 / 3 * 2 / 3)
    for seed in range(3):
        counts = (draws == seed).sum(axis=0)
        assert np.abs(counts - 2000).max() < 4 * deviation
    together = (draws[:, 0, 0] == draws[:, 0, 1]).sum()  # expected for independent draws: one in three
    assert abs(together - 2000) < 4 * deviation


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("confidence", [0.95, 0.5])
def test_intervals_equal_naive_loops(statistic, confidence):
    scores = random_scores(4, 3)
    values = [
        NAIVE[statistic](naive_resample(scores.tolist(), draw.tolist()))
        for draw in stats.resample_seeds(np.random.default_rng(5), 100, 4, 3)
    ]
    tail = (1 - confidence) / 2
    expected = [NAIVE[statistic](scores.tolist()), naive_quantile(values, tail), naive_quantile(values, 1 - tail)]
    assert stats.interval(scores, statistic, 100, confidence, seed=5) == pytest.approx(expected, abs=1e-12)


def test_interval_of_two_seeds_in_closed_form():
    # the resampled mean is 3 with probability 1/4, 5 with 1/2, 7 with 1/4
    scores = [[3.0], [7.0]]
    assert stats.interval(scores, stats.mean) == (5.0, 3.0, 7.0)
    assert stats.interval(scores, stats.mean, confidence=0.6) == (5.0, 3.0, 7.0)
    assert stats.interval(scores, stats.mean, confidence=0.4) == (5.0, 5.0, 5.0)


def test_interval_of_three_seeds_in_closed_form():
    # the mean is 0 with probability 1/27 and 1/3 of the middle seed with 3/27 more
    scores = [[0.0], [3.0], [9.0]]
    assert stats.interval(scores, stats.mean, confidence=0.95) == (4.0, 0.0, 9.0)  # 1/40 < 1/27
    # from the top, 9 has probability 1/27 and 7 has 3/27; 1/20 lies between 1/27 and 4/27
    assert stats.interval(scores, stats.mean, confidence=0.90) == (4.0, 1.0, 7.0)


def test_interval_of_two_tasks_in_closed_form():
    # the mean of each task is low, middle or high with probability 1/4, 1/2, 1/4, so 50 has 1/16 and 50.5 has 1/8
    scores = [[0.0, 100.0], [2.0, 104.0]]
    assert stats.interval(scores, stats.mean, confidence=0.95) == (51.5, 50.0, 53.0)  # 1/40 < 1/16
    assert stats.interval(scores, stats.mean, confidence=0.80) == (51.5, 50.5, 52.5)  # 1/16 < 1/10 < 3/16


@pytest.mark.parametrize("statistic", STATISTICS)
def test_resampling_never_mixes_tasks(statistic):
    """If all seeds of a task agree, the interval has no width, however different the tasks are."""
    scores = np.tile([1e-3, 0.1, 1 / 3, 7.7, 1e6], (11, 1))
    point, low, high = stats.interval(scores, statistic, resamples=200)
    assert low == point == high
    assert stats.interval(scores * np.linspace(0.9, 1.1, 11)[:, None], statistic, resamples=200).low < point


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (1, 3, 4)])
def test_one_seed_has_an_interval_of_no_width(statistic, shape):
    scores = random_scores(*shape)
    point, low, high = stats.interval(scores, statistic, resamples=50)
    np.testing.assert_array_equal(low, point)
    np.testing.assert_array_equal(high, point)
    np.testing.assert_allclose(point, statistic(scores), atol=1e-12)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_intervals_are_reproducible_for_a_generator_seed(statistic):
    scores = random_scores(5, 4)
    assert stats.interval(scores, statistic, 100, seed=3) == stats.interval(scores, statistic, 100, seed=3)
    assert stats.interval(scores, statistic, 100, seed=3) != stats.interval(scores, statistic, 100, seed=4)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_interval_of_a_curve_equals_intervals_of_its_epochs(statistic):
    scores = random_scores(4, 3, 6)
    curve = stats.interval(scores, statistic, resamples=100)
    points = [stats.interval(scores[:, :, epoch], statistic, resamples=100) for epoch in range(6)]
    assert all(isinstance(value, float) for point in points for value in point)
    for name in stats.Interval._fields:
        np.testing.assert_allclose(getattr(curve, name), [getattr(p, name) for p in points], atol=1e-12)
    assert len(set(curve.low)) == 6


@pytest.mark.parametrize("chunk", [1, 500, 10**9])
def test_chunk_size_does_not_change_results(chunk, monkeypatch):
    scores, other = random_scores(4, 3, 6), random_scores(5, 3, seed=1)

    def results():
        yield from (stats.interval(scores, statistic, resamples=101) for statistic in STATISTICS)
        yield stats.performance_profile(other, [0.0, 1.0], resamples=101)
        yield stats.probability_of_improvement(scores[..., 0], other, resamples=101)

    expected = list(results())
    monkeypatch.setattr(stats, "CHUNK", chunk)
    for a, b in zip(expected, results(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_chunks_bound_the_resamples_in_memory(monkeypatch):
    sizes = []

    def recording_iqm(scores):
        sizes.append(scores.size)
        return stats.iqm(scores)

    monkeypatch.setattr(stats, "CHUNK", 500)
    stats.interval(random_scores(4, 3, 6), recording_iqm, resamples=101)  # a resample has 72 numbers, so a chunk has 6
    assert sizes == [72, *[6 * 72] * 16, 5 * 72]  # the first call is the point estimate


def test_epochs_of_a_curve_share_their_resamples():
    """A curve that is constant over epochs has the same interval at every epoch."""
    scores = np.repeat(random_scores(4, 3, 1), 5, axis=2)
    for values in stats.interval(scores, resamples=50):
        assert values.shape == (5,)
        assert len(set(values)) == 1


def test_any_function_of_seeds_and_tasks_is_a_statistic():
    best = stats.interval([[3.0], [7.0]], lambda scores: scores.max(axis=(0, 1)))
    assert best == (7.0, 3.0, 7.0)  # 3 with probability 1/4
    with pytest.raises(UserError, match="keep the others"):
        stats.interval([[3.0], [7.0]], np.max)


def test_intervals_have_about_nominal_coverage():
    """The IQM of a normal distribution is its mean; percentile intervals of ten seeds are a little narrow."""
    scores = np.random.default_rng(7).normal(2.0, 1.0, (200, 10, 4))
    intervals = [stats.interval(scores[i], resamples=200, seed=i) for i in range(200)]
    covered = sum(low <= 2.0 <= high for _, low, high in intervals) / 200
    assert 0.85 <= covered < 1
    halves = [stats.interval(scores[i], resamples=200, confidence=0.5, seed=i) for i in range(200)]
    assert 0.38 <= sum(low <= 2.0 <= high for _, low, high in halves) / 200 <= 0.6


def test_integer_and_single_precision_scores_are_accepted():
    whole = np.arange(8).reshape(4, 2)
    assert stats.interval(whole) == stats.interval(whole.astype(np.float32)) == stats.interval(whole.astype(float))


# -- functions of intervals


def test_relative_divides_point_and_interval():
    assert stats.relative(stats.Interval(3.0, 2.0, 5.0), 4.0) == (0.75, 0.5, 1.25)
    curve = stats.relative(stats.Interval(*np.array([[2.0, 8.0], [1.0, 4.0], [4.0, 16.0]])), [2.0, 4.0])
    np.testing.assert_array_equal(curve, [[1.0, 2.0], [0.5, 1.0], [2.0, 4.0]])


def test_relative_to_itself_is_one():
    scores = stats.auc(np.abs(random_scores(5, 3, 10)))
    assert stats.relative(stats.interval(scores), stats.iqm(scores)).point == 1.0


def test_normalised_auc_is_the_ratio_of_mean_performances():
    """Appendix A of the paper: the number of epochs cancels out."""
    ours, baseline = np.abs(random_scores(5, 3, 10)), np.abs(random_scores(5, 3, 10, seed=1))
    sums = stats.relative(stats.interval(stats.auc(ours)), stats.iqm(stats.auc(baseline)))
    means = stats.relative(stats.interval(ours.mean(axis=-1)), stats.iqm(baseline.mean(axis=-1)))
    assert sums == pytest.approx(means)


@pytest.mark.parametrize("baseline", [0.0, -1.5, np.nan, np.inf, [1.0, 0.0]])
def test_a_baseline_must_be_positive(baseline):
    with pytest.raises(UserError, match="normalise scores so that the baseline is positive"):
        stats.relative(stats.Interval(1.0, 0.5, 1.5), baseline)


def test_profile_by_hand():
    scores = [[0.0, 1.0], [2.0, 3.0]]
    profile = stats.performance_profile(scores, [-1.0, 0.0, 0.5, 1.0, 2.5, 3.0])  # strictly above: 0 is not above 0
    np.testing.assert_array_equal(profile.point, [1.0, 0.75, 0.75, 0.5, 0.25, 0.0])
    # one seed of the first task and both of the second are above 0.5: 2, 3 or 4 of 4 with probability 1/4, 1/2, 1/4
    np.testing.assert_array_equal(profile.low, [1.0, 0.5, 0.5, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(profile.high, [1.0, 1.0, 1.0, 1.0, 0.5, 0.0])


def test_profile_equals_naive_loops():
    scores, thresholds = random_scores(4, 3), [0.1, 0.9, 1.7]
    draws = stats.resample_seeds(np.random.default_rng(2), 60, 4, 3)
    profile = stats.performance_profile(scores, thresholds, resamples=60, seed=2)

    def share(rows, level):
        return sum(score > level for row in rows for score in row) / 12

    for i, level in enumerate(thresholds):
        values = [share(naive_resample(scores.tolist(), draw.tolist()), level) for draw in draws]
        expected = [share(scores.tolist(), level), naive_quantile(values, 0.025), naive_quantile(values, 0.975)]
        assert [part[i] for part in profile] == pytest.approx(expected, abs=1e-12)


def test_probability_of_improvement_by_hand():
    low, high = [[0.0, 5.0], [1.0, 6.0]], [[2.0, 9.0], [3.0, 8.0], [4.0, 7.0]]
    assert stats.probability_of_improvement(high, low) == (1.0, 1.0, 1.0)
    assert stats.probability_of_improvement(low, high) == (0.0, 0.0, 0.0)
    same = random_scores(6, 3)
    assert stats.probability_of_improvement(same, same).point == 0.5
    # first task: 1 ties with 1 and loses to 2, 2 beats 1 and ties with 2: 2 of 4; second: 3 beats both, 0 neither
    assert stats.probability_of_improvement([[1, 3], [2, 0]], [[1, 1], [2, 2]]).point == 0.5
    # 2 beats 1 and ties with 2, 3 beats both: 3.5 of 4
    assert stats.probability_of_improvement([[2], [3]], [[1], [2]]).point == 3.5 / 4


def test_probability_of_improvement_resamples_both_methods():
    # x is all 2 and y all 3 with probability 1/16, then x never wins; x always wins with at least 1/16 too
    assert stats.probability_of_improvement([[2.0], [4.0]], [[1.0], [3.0]]) == (0.75, 0.0, 1.0)
    # x wins half of the time if one of them is mixed and the other is the worst for x, with probability 1/8 + 1/8
    assert stats.probability_of_improvement([[2.0], [4.0]], [[1.0], [3.0]], confidence=0.8).low == 0.5


@pytest.mark.parametrize("decimals", [0, 3])  # with many ties and without any
def test_probability_of_improvement_equals_naive_loops(decimals):
    x, y = random_scores(4, 3).round(decimals), random_scores(5, 3, seed=1).round(decimals)
    rng = np.random.default_rng(9)
    left, right = stats.resample_seeds(rng, 80, 4, 3), stats.resample_seeds(rng, 80, 5, 3)
    values = [
        naive_improvement(naive_resample(x.tolist(), i.tolist()), naive_resample(y.tolist(), j.tolist()))
        for i, j in zip(left, right, strict=True)
    ]
    expected = [naive_improvement(x.tolist(), y.tolist()), naive_quantile(values, 0.025), naive_quantile(values, 0.975)]
    assert stats.probability_of_improvement(x, y, 80, seed=9) == pytest.approx(expected, abs=1e-12)
    assert stats.probability_of_improvement(y, x, 80).point == pytest.approx(1 - expected[0], abs=1e-12)


# -- invalid input

FUNCTIONS = (
    *STATISTICS,
    stats.interval,
    lambda scores: stats.performance_profile(scores, [0.5]),
    lambda scores: stats.probability_of_improvement(scores, np.ones((2, 3))),
    lambda scores: stats.probability_of_improvement(np.ones((2, 3)), scores),
)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("scores", "sentence"),
    [
        (np.zeros(3), r"must have the axes .*\(seeds, tasks.*, but their shape is \(3,\)"),
        (1.0, "must have the axes"),
        (np.zeros((0, 3)), r"There are no scores: their shape is \(0, 3\)"),
        (np.zeros((3, 0)), "There are no scores"),
        (
            [[1.0, 2.0, 3.0], [1.0, np.nan, 3.0]],
            r"must be finite, but the one at \(1, 1\) of the shape \(2, 3\) is nan",
        ),
        ([[1.0, 2.0, -np.inf]], "is -inf"),
        ([[1.0, 2.0], [3.0]], "as many seeds for every task"),
        ([["high", "low", "low"]], "must be numbers"),
    ],
)
def test_scores_are_checked(function, scores, sentence):
    with pytest.raises(UserError, match=sentence):
        function(scores)


def test_the_number_of_axes_is_checked():
    for function in FUNCTIONS[-3:]:
        with pytest.raises(UserError, match=r"must have the axes \(seeds, tasks\), but their shape is \(2, 3, 4\)"):
            function(np.ones((2, 3, 4)))
    with pytest.raises(UserError, match=r"the axes \(seeds, tasks, epochs\), but their shape is \(2, 3\)"):
        stats.auc(np.ones((2, 3)))
    with pytest.raises(UserError, match=r"the axes \(seeds, tasks\) or \(seeds, tasks, epochs\)"):
        stats.interval(np.ones((2, 3, 4, 5)))


def test_methods_must_have_the_same_number_of_tasks():
    with pytest.raises(UserError, match="the same tasks, and these have 3 and 4"):
        stats.probability_of_improvement(np.ones((2, 3)), np.ones((2, 4)))


@pytest.mark.parametrize("thresholds", [[], 0.5, [0.1, np.nan], [[0.1, 0.2]]])
def test_thresholds_are_checked(thresholds):
    with pytest.raises(UserError, match="Thresholds must be a list"):
        stats.performance_profile(np.ones((2, 3)), thresholds)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95, np.nan])
def test_confidence_is_checked(confidence):
    with pytest.raises(UserError, match="above 0 and below 1"):
        stats.interval(np.ones((2, 3)), confidence=confidence)


def test_the_number_of_resamples_is_checked():
    with pytest.raises(UserError, match="at least 1 resample, not 0"):
        stats.interval(np.ones((2, 3)), resamples=0)
