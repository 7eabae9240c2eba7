"""Pictures of a trace: a pixel for each layer and token, with its number."""

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


def test_pixels_are_the_means_over_features(traces):
    figure = plot.trace(traces, list("abcde"), sequence=1)
    panels = figure.axes[: len(plot.QUANTITIES)]
    titles = [ax.get_title(loc="left") for ax in panels]
    assert titles == list(plot.QUANTITIES.values())
    gain = panels[titles.index("gain K")].images[0].get_array()
    for layer, trace in enumerate(traces):
        expected = trace.gain[1].mean(-1).detach().numpy()
        np.testing.assert_allclose(gain[layer], expected, rtol=1e-6)
    names = [label.get_text() for label in panels[-1].get_xticklabels()]
    assert names == list("abcde")
    plt.close(figure)


def test_what_saw_nothing_stays_empty(traces):
    figure = plot.trace(
        traces, sequence=0, quantities=["log_observation_precision"]
    )
    assert np.ma.getmaskarray(figure.axes[0].images[0].get_array()).all()
    plt.close(figure)


def test_bad_input_is_named(traces):
    with pytest.raises(ValueError, match="traces: expected at least one"):
        plot.trace([])
    with pytest.raises(ValueError, match="tokens: expected 5 names, got 2"):
        plot.trace(traces, ["a", "b"])
    with pytest.raises(ValueError, match="quantities: expected at least one"):
        plot.trace(traces, quantities=[])
    with pytest.raises(TypeError, match="traces: expected a list of them"):
        plot.trace(traces[0])
    shorter = make_encoder(1).steps(make_belief(tokens=3))[1]
    with pytest.raises(ValueError, match="traces: .* of 3 and 5 tokens"):
        plot.trace([*traces, *shorter])
    with pytest.raises(ValueError, match="quantity: expected one of n_eff"):
        plot.by_token(traces[0], "mean")
