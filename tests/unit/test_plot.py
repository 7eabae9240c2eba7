"""Pictures of a trace: a pixel for each layer and token, with its number."""

from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from bft_ref import plot
from tests.factories import make_belief, make_encoder


@pytest.fixture
def traces():
    hidden = torch.zeros(2, 5, dtype=torch.bool)
    hidden[0] = True  # the first sequence sees nothing at all
    return make_encoder(3).steps(make_belief(), None, hidden)[1]


@pytest.fixture
def causal():
    return make_encoder(3).steps(make_belief(), is_causal=True)[1]


def panels(figure):
    """The panels by title, without the bars of colours."""
    found = {ax.get_title(loc="left"): ax for ax in figure.axes}
    plt.close(figure)
    return {title: ax for title, ax in found.items() if title}


def test_pixels_are_the_means_over_features(traces):
    every = list(plot.QUANTITIES)
    found = panels(plot.trace(traces, list("abcde"), 1, every))
    titles = list(plot.QUANTITIES.values())
    titles[-1] += " that a token is given, in equal shares"
    assert list(found) == titles
    gain = found["gain K"].images[0].get_array()
    for layer, trace in enumerate(traces):
        expected = trace.gain[1].mean(-1).detach().numpy()
        np.testing.assert_allclose(gain[layer], expected, rtol=1e-6)
    names = [label.get_text() for label in found[titles[-1]].get_xticklabels()]
    assert names == list("abcde")


def test_attention_is_the_mean_of_those_that_look_in_equal_shares(causal):
    (ax,) = panels(plot.trace(causal, quantities=["weights"])).values()
    shown = ax.images[0].get_array()
    for layer, trace in enumerate(causal):
        weights = trace.weights[0].mean(0).detach().numpy()
        for token in range(5):
            sees = np.arange(1, 6)  # a token itself, and those before
            due = (sees * weights[:, token])[token:].mean()
            assert shown[layer, token] == pytest.approx(due, rel=1e-5)


def test_attention_may_be_that_of_one_token(causal):
    for query, named in [(2, "c"), (-1, "$e$")]:
        names = ["a", "b", "c", "d", "$e$"]
        figure = plot.trace(causal, names, query=query)
        ax = panels(figure)[f"attention α̃ of {named}"]
        weights = causal[1].weights[0, :, query].mean(0).detach().numpy()
        shown = np.ma.filled(ax.images[0].get_array()[1], 0.0)
        np.testing.assert_allclose(shown, weights, rtol=1e-5)


def test_one_layer_has_lines_and_the_map_of_who_looks_at_whom(causal):
    names = ["a", "$b", "c\n", "d", "e"]
    found = panels(plot.trace(causal[0], names))
    assert list(found) == [plot.QUANTITIES[name] for name in plot.SHOWN]
    *lines, attention = found.values()
    for ax, value in zip(
        lines,
        [causal[0].gain, causal[0].log_predicted_precision],
        strict=True,
    ):
        x, y = ax.lines[0].get_data()
        assert x.tolist() == list(range(5))
        due = value[0].mean(-1).detach().numpy()
        np.testing.assert_allclose(y, due, rtol=1e-6)
    shown = attention.images[0].get_array()
    future = np.triu(np.ones((5, 5), bool), 1)
    np.testing.assert_array_equal(np.ma.getmaskarray(shown), future)
    due = causal[0].weights[0].mean(0).detach().numpy()
    np.testing.assert_allclose(shown.filled(0.0), due, rtol=1e-5)
    for labels in [attention.get_xticklabels(), attention.get_yticklabels()]:
        said = [label.get_text() for label in labels]
        assert said == ["a", "$b", r"c\n", "d", "e"]


@pytest.mark.parametrize("count", [10, 40])
@pytest.mark.parametrize("layers", [1, 4])
def test_names_do_not_touch_one_another(count, layers):
    belief = make_belief(1, count)
    traces = make_encoder(layers).steps(belief, is_causal=True)[1]
    figure = plot.trace(traces, [f"token {i}" for i in range(count)])
    figure.draw_without_rendering()
    labelled = [
        axis.get_ticklabels()
        for ax in figure.axes
        for axis in (ax.xaxis, ax.yaxis)
        if ax.images and len(axis.get_ticklabels()) == count
    ]
    assert len(labelled) >= 1 + (layers == 1)
    for labels in labelled:
        boxes = [one.get_window_extent() for one in labels if one.get_text()]
        size = labels[0].get_fontsize()
        assert size >= 7
        for one, other in pairwise(boxes):
            across = abs(other.x0 - one.x0), abs(other.y0 - one.y0)
            assert max(across) >= size * figure.dpi / 72
    plt.close(figure)


def test_layers_have_their_numbers(causal):
    figure = plot.trace(causal, quantities=["gain"], layers=[22, 23, 24])
    (ax,) = panels(figure).values()
    said = [label.get_text() for label in ax.get_yticklabels()]
    assert said == ["22", "23", "24"]


def test_with_a_cache_the_new_tokens_are_shown():
    encoder, belief = make_encoder(2), make_belief()
    caches = encoder.make_caches()
    encoder(belief.at[:, :3], is_causal=True, caches=caches)
    new = belief.at[:, 3:]
    traces = encoder.steps(new, is_causal=True, caches=caches)[1]
    found = panels(plot.trace(traces, ["d", "e"]))
    assert list(found) == [plot.QUANTITIES[name] for name in plot.SHOWN[:2]]
    with pytest.raises(ValueError, match="2 tokens, got 'weights' of 5"):
        plot.trace(traces, quantities=["weights"])


def test_what_saw_nothing_stays_empty(traces):
    figure = plot.trace(
        traces, sequence=0, quantities=["log_observation_precision"]
    )
    assert np.ma.getmaskarray(figure.axes[0].images[0].get_array()).all()
    plt.close(figure)


def test_bad_input_is_named(traces):
    with pytest.raises(ValueError, match="traces: expected at least one"):
        plot.trace([])
    with pytest.raises(ValueError, match="tokens: expected 5 of them, got 2"):
        plot.trace(traces, ["a", "b"])
    with pytest.raises(ValueError, match="quantities: expected at least one"):
        plot.trace(traces, quantities=[])
    with pytest.raises(ValueError, match="layers: expected 3 of them, got 1"):
        plot.trace(traces, layers=[1])
    bare = traces[0].observation._replace(weights=None)
    without = traces[0]._replace(observation=bare)
    with pytest.raises(ValueError, match="'weights' were not kept"):
        plot.trace(without, quantities=["weights"])
    found = panels(plot.trace(without, sequence=1))
    assert list(found) == [plot.QUANTITIES[name] for name in plot.SHOWN[:2]]
    shorter = make_encoder(1).steps(make_belief(tokens=3))[1]
    with pytest.raises(ValueError, match="traces: .* of 3 and 5 tokens"):
        plot.trace([*traces, *shorter])
    with pytest.raises(ValueError, match="quantity: expected one of n_eff"):
        plot.by_token(traces[0], "mean")
