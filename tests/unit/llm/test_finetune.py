"""Fine-tuning on cached states: the same numbers, sooner, and resumed."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from bft_ref.llm import qa
from bft_ref.llm.finetune import command
from bft_ref.llm.finetune.adaptation import (
    Adaptation,
    adapt,
    trained,
)
from bft_ref.llm.finetune.anatomy import by_layer, by_passage, ranks_noise
from bft_ref.llm.finetune.evaluate import answer, nll, upper
from bft_ref.llm.finetune.known import Known, log_tau
from bft_ref.llm.finetune.losses import answer_loss
from bft_ref.llm.finetune.states import lower_states
from bft_ref.llm.finetune.trainer import FineTuneConfig, batches, fit, rate
from bft_ref.llm.model import is_added
from bft_ref.training.checkpoint import RunError
from tests.unit.llm import small

TOP = Adaptation(top=2)
FILTER = Adaptation(variant="kalman", gain=0.8, top=2)
VARIANTS = [
    TOP,
    Adaptation(top=2, gain=0.8),
    FILTER,
    Adaptation(variant="kalman", gain=0.8, top=2, initial_precision="mlp"),
    Adaptation(variant="constant", gain=0.8, top=2),
    Adaptation(variant="gate", gain=0.8, top=2),
    Adaptation(variant="tau_bias", top=2, initial_precision="mlp"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return small.tokenizer()


@pytest.fixture(scope="module")
def examples(tokenizer):
    return [qa.encode(tokenizer, q) for q in small.questions()]


@pytest.fixture(scope="module")
def noisy(tokenizer):
    """The same questions among two passages, with a retriever's scores."""
    asked = small.questions()
    found = []
    for question, ranked in zip(asked, qa.rank(asked, keep=2), strict=True):
        shown, gold, scores = qa.context(question, ranked, 2)
        found.append(
            qa.encode(
                tokenizer,
                question,
                shown,
                gold_passage=gold,
                retrieved=scores,
            )
        )
    return found


def prepared(adaptation, examples, folder, known=None, cache=False):
    """A model, adapted, and the states below what is trained of it."""
    model = small.llama()
    states = lower_states(
        model, examples, 1, folder, keep_cache=cache, progress=False
    )
    start = [list(e.prompt[:20]) for e in examples]
    return adapt(model, adaptation, start, known=known), states


def fitted(model, states, config=None, **options):
    labels = [np.array(e.answer) for e in states.examples]
    return fit(
        model,
        states,
        labels,
        config or FineTuneConfig(batch_size=3, epochs=2),
        identity={"run": 1},
        progress=False,
        **options,
    )


def whole(model, example, tokens=None):
    """The model's own logits at the places that predict the answer."""
    ids = torch.tensor([tokens or example.tokens])
    start = len(example.prompt) - 1
    with torch.no_grad():
        return model(ids).logits[0, start : start + len(example.answer)]


@pytest.mark.parametrize("adaptation", VARIANTS)
def test_cached_lower_layers_are_the_full_model(
    adaptation, examples, tmp_path
):
    model, states = prepared(adaptation, examples, tmp_path)
    model.eval()
    with torch.no_grad():
        found = upper(model, states, range(len(examples)))
    expected = torch.cat([whole(model, each) for each in examples])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("adaptation", VARIANTS)
def test_cached_answers_are_those_of_generate(
    adaptation, examples, tokenizer, tmp_path
):
    model, states = prepared(adaptation, examples, tmp_path, cache=True)
    if adaptation == TOP:
        fitted(model, states, FineTuneConfig(lr=3e-2, epochs=6, batch_size=2))
    found = answer(model, tokenizer, states, max_new_tokens=7, batch_size=3)
    for example, text in zip(examples, found.texts, strict=True):
        ids = torch.tensor([example.prompt])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=7,
                do_sample=False,
            )
        line = tokenizer.decode(
            out[0, ids.shape[1] :], skip_special_tokens=True
        )
        assert text == line.strip().split("\n")[0].strip()
    each = torch.stack(
        [
            nn.functional.cross_entropy(
                whole(model, e), torch.tensor(e.answer)
            )
            for e in examples
        ]
    )
    np.testing.assert_allclose(found.nll, each.numpy(), rtol=1e-4)
    assert nll(model, states) == pytest.approx(each.mean().item(), rel=1e-4)
    report = found.report()
    assert report["questions"] == len(examples) == len(report["each"]["f1"])
    json.dumps(report, allow_nan=False)


def test_states_are_computed_once_and_know_their_weights(
    examples, tmp_path, monkeypatch
):
    model = small.llama()
    first = lower_states(model, examples, 1, tmp_path, progress=False)
    monkeypatch.setattr(
        "bft_ref.llm.finetune.states.through",
        lambda *_, **__: pytest.fail("computed again"),
    )
    again = lower_states(model, examples, 1, tmp_path, progress=False)
    assert (again.hidden == first.hidden).all()
    with pytest.raises(ValueError, match="keep_cache=True"):
        again.cache([0], 9)
    monkeypatch.undo()
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(2)  # above the cut
    lower_states(model, examples, 1, tmp_path, progress=False)
    assert len([x for x in tmp_path.iterdir() if x.is_dir()]) == 1
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    other = lower_states(model, examples, 1, tmp_path, progress=False)
    assert (other.hidden != first.hidden).any()
    lower_states(model, examples[1:], 1, tmp_path, progress=False)
    assert len([x for x in tmp_path.iterdir() if x.is_dir()]) == 3


def test_bad_states_are_refused(examples, tmp_path):
    with pytest.raises(ValueError, match="one or more, got none"):
        lower_states(small.llama(), [], 1, tmp_path)
    with pytest.raises(ValueError, match="0 <= cut <= 3"):
        lower_states(small.llama(), examples, 4, tmp_path)


@pytest.mark.parametrize("adaptation", [TOP, FILTER])
def test_a_resumed_run_is_an_uninterrupted_one(adaptation, examples, tmp_path):
    config = FineTuneConfig(batch_size=3, epochs=3, evaluate_every=2)

    def run(path, stop=None):
        model, states = prepared(adaptation, examples, tmp_path)
        looks = []

        def validate():
            if len(looks) == stop:
                raise KeyboardInterrupt
            looks.append(nll(model, states))
            return looks[-1]

        history = fitted(
            model,
            states,
            config,
            validate=validate,
            checkpoint=path,
            checkpoint_every=2,
        )
        return trained(model), history

    free, history = run(tmp_path / "a.pt")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b.pt", stop=2)
    resumed, later = run(tmp_path / "b.pt")
    for name, p in free.items():
        assert torch.equal(p, resumed[name]), name
    for name in ("loss", "looks", "best_step", "steps"):
        assert history[name] == later[name]
    assert len(history["loss"]) == history["steps"] == 9


def test_a_checkpoint_of_another_run_is_refused(examples, tmp_path):
    model, states = prepared(TOP, examples, tmp_path)
    fitted(model, states, checkpoint=tmp_path / "a.pt")
    with pytest.raises(RunError, match="another configuration"):
        fit(
            model,
            states,
            [np.array(e.answer) for e in examples],
            FineTuneConfig(),
            identity={"run": 2},
            checkpoint=tmp_path / "a.pt",
        )


def test_training_learns_the_answers_and_nothing_below_moves(
    examples, tmp_path
):
    model, states = prepared(TOP, examples, tmp_path)
    before = {n: p.clone() for n, p in model.named_parameters()}
    history = fitted(
        model, states, FineTuneConfig(lr=1e-2, epochs=12, batch_size=4)
    )
    assert history["loss"][-1] < 0.75 * history["loss"][0]
    for name, p in model.named_parameters():
        upper_layer = name.startswith(("model.layers.1.", "model.layers.2."))
        assert torch.equal(p, before[name]) != upper_layer, name


def test_the_best_look_is_kept(examples, tmp_path):
    model, states = prepared(TOP, examples, tmp_path)
    values = iter([2.0, 1.0, 3.0])
    kept = []

    def validate():
        kept.append({n: p.clone() for n, p in trained(model).items()})
        return next(values)

    config = FineTuneConfig(batch_size=8, epochs=3, evaluate_every=1, lr=0.01)
    history = fitted(model, states, config, validate=validate)
    assert history["best_step"] == 2
    assert all(
        torch.equal(p, kept[1][name]) for name, p in trained(model).items()
    )
    with pytest.raises(RunError, match="without validation"):
        fitted(model, states, config)


def test_only_precisions_take_their_own_rate(examples, tmp_path):
    model, states = prepared(
        VARIANTS[3], examples, tmp_path
    )  # its network's matrices are none
    before = {n: p.clone() for n, p in trained(model).items()}
    config = FineTuneConfig(
        batch_size=8, lr=1e-9, precision_lr=0.1, weight_decay=0.0
    )
    fitted(model, states, config)
    for name, p in trained(model).items():
        size = (p - before[name]).abs().max().item()
        fast = is_added(name) and p.dim() < 2
        assert size <= (0.11 if fast else 2e-7), name
    ends = [n for n in before if n.endswith("process_noise.weight")]
    assert any((trained(model)[n] != before[n]).any() for n in ends)


def test_lora_trains_its_own_matrices_and_the_precisions(examples, tmp_path):
    adaptation = replace(FILTER, lora_rank=2)
    model, states = prepared(adaptation, examples, tmp_path)
    names = trained(model)
    assert all("lora_" in name or is_added(name) for name in names)
    assert sum("lora_A" in name for name in names) == 2 * 7
    assert sum(map(is_added, names)) == 3
    history = fitted(
        model, states, FineTuneConfig(lr=3e-2, epochs=8, batch_size=4)
    )
    assert history["loss"][-1] < history["loss"][0]


def test_a_scaled_map_is_the_same_map(examples, tmp_path):
    plain, states = prepared(TOP, examples, tmp_path)
    scaled, _ = prepared(VARIANTS[1], examples, tmp_path)
    for one, other in [(plain, scaled)]:
        torch.testing.assert_close(
            upper(one, states, [0, 1]), upper(other, states, [0, 1])
        )
    weight = scaled.model.layers[1].self_attn.o_proj.inner.weight
    expected = plain.model.layers[1].self_attn.o_proj.weight / 0.8
    torch.testing.assert_close(weight, expected)


def test_a_calibrated_filter_starts_harmless(examples, tmp_path):
    model, states = prepared(FILTER, examples, tmp_path)
    found = by_layer(model, states, range(8))
    assert found["gain"] == pytest.approx([0.8, 0.8], abs=0.1)
    assert set(map(len, found.values())) == {2}
    plain, _ = prepared(TOP, examples, tmp_path)
    with pytest.raises(TypeError, match="layers that filter"):
        by_layer(plain, states, [0])


@pytest.mark.parametrize("role", ["precision", "bias"])
def test_known_scores_reach_the_model(role, noisy, tokenizer, tmp_path):
    known = Known(role, 2.0)
    adaptation = FILTER if role == "precision" else TOP
    model, states = prepared(
        adaptation, noisy, tmp_path, known=known, cache=True
    )
    told = upper(model, states, range(8), known)
    weak = upper(model, states, range(8), Known(role, 1e-6))
    again, _ = prepared(adaptation, noisy, tmp_path)
    untold = upper(again, states, range(8))
    torch.testing.assert_close(weak, untold, atol=1e-3, rtol=1e-3)
    assert (told - untold).abs().max() > 1e-2
    found = answer(model, tokenizer, states, known=known, batch_size=4)
    alone = answer(model, tokenizer, states, known=known, batch_size=1)
    assert found.texts == alone.texts


def test_known_scores_are_those_of_the_passage(noisy):
    example = noisy[0]
    found = log_tau([example], len(example.tokens), 2.0)[0]
    best = max(example.retrieved)
    for place, of in enumerate(example.passage_of):
        expected = (
            0
            if of < 0
            else 2 * np.log((1 + example.retrieved[of]) / (1 + best))
        )
        assert found[place].item() == pytest.approx(expected, abs=1e-6)
    assert (found[len(example.prompt) :] == 0).all()
    with pytest.raises(ValueError, match="retriever's scores"):
        log_tau([replace(example, retrieved=())], 9, 1.0)


def test_a_plain_model_has_no_precision_to_be_told(noisy, tmp_path):
    with pytest.raises(ValueError, match="known: expected a bias"):
        prepared(TOP, noisy, tmp_path, known=Known("precision"))


def test_passages_are_told_apart(noisy, examples, tmp_path):
    known = Known("precision", 3.0)
    model, states = prepared(FILTER, noisy, tmp_path, known=known)
    found = by_passage(model, states, range(8), known)
    # gold has the best score in each of these prompts
    assert found["log_precision"][0] > 0
    assert len(found["log_precision"]) == len(found["log_weight"]) == 2
    model, alone = prepared(FILTER, examples, tmp_path)
    with pytest.raises(ValueError, match="gold alone"):
        by_passage(model, alone, [0])


def test_the_loss_ranks_wrong_labels_after_training(examples, tmp_path):
    model, states = prepared(FILTER, examples, tmp_path)
    right = [np.array(e.answer) for e in examples]
    fit(
        model,
        states,
        right,
        FineTuneConfig(lr=1e-2, epochs=12, batch_size=4),
        identity=0,
        progress=False,
    )
    labels, wrong = qa.corrupt(examples, 0.4, np.arange(1, 257))
    found = ranks_noise(model, states, labels, wrong, filters=True)
    assert found["loss"] > 0.8
    assert found.keys() == {"loss", "gain", "variance"}
    none = [np.zeros(len(x), dtype=bool) for x in right]
    found = ranks_noise(model, states, right, none, filters=False)
    assert np.isnan(found["loss"]) and found.keys() == {"loss"}


def test_focal_loss_is_its_formula():
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 7), torch.tensor([0, 1, 2, 3, 4])
    p = logits.softmax(-1)[torch.arange(5), labels]
    expected = ((1 - p) ** 1.5 * -p.log()).mean()
    found = answer_loss(logits, labels, loss="focal", gamma=1.5)
    torch.testing.assert_close(found, expected)
    plain = answer_loss(logits, labels)
    torch.testing.assert_close(
        answer_loss(logits, labels, loss="focal", gamma=0.0), plain
    )
    spread = answer_loss(logits, labels, smoothing=0.1)
    uniform = -logits.log_softmax(-1).mean()
    torch.testing.assert_close(spread, 0.9 * plain + 0.1 * uniform)
    sure = torch.tensor([[200.0, 0.0]], requires_grad=True)
    answer_loss(sure, torch.tensor([0]), loss="focal", gamma=0.5).backward()
    assert sure.grad.isfinite().all()
    with pytest.raises(ValueError, match="gamma"):
        answer_loss(logits, labels, loss="focal", gamma=-1.0)


def test_the_rate_rises_and_falls():
    found = [rate(step, 20, 0.1) for step in range(20)]
    assert found[:3] == [0.5, 1.0, pytest.approx(1.0)]
    assert found[-1] == pytest.approx(1 / 18)
    assert all(a > b for a, b in itertools.pairwise(found[2:]))
    assert rate(0, 1, 0.0) == 1.0


def test_batches_hold_everything_once_and_like_lengths():
    lengths = np.random.default_rng(0).integers(1, 99, size=100).tolist()
    found = batches(lengths, 4, np.random.default_rng(1))
    assert sorted(itertools.chain(*found)) == list(range(100))
    spread = np.mean([np.ptp([lengths[i] for i in b]) for b in found])
    assert spread < 25  # of batches at random it is about 60
    assert found == batches(lengths, 4, np.random.default_rng(1))
    assert found != batches(lengths, 4, np.random.default_rng(2))


@pytest.mark.parametrize(
    "make, options, message",
    [
        (FineTuneConfig, {"lr": 0.0}, "lr"),
        (FineTuneConfig, {"epochs": 0}, "epochs"),
        (FineTuneConfig, {"gamma": 3.0}, "gamma: .*loss 'sft'"),
        (
            FineTuneConfig,
            {"loss": "focal", "smoothing": 0.1},
            "smoothing: .*loss 'focal'",
        ),
        (Adaptation, {"variant": "kalman"}, "gain: expected < 1"),
        (Adaptation, {"gain": 0.0}, r"gain: expected in \(0, 1\]"),
        (Adaptation, {"initial_precision": "mlp"}, "a plain model"),
        (Adaptation, {"top": 0}, "top"),
        (command.Task, {"noise": 1.5}, "noise"),
        (command.Task, {"asked": ()}, "asked"),
    ],
)
def test_bad_options_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_more_layers_than_there_are_is_refused():
    with pytest.raises(ValueError, match="top: .*3 layers, got 4"):
        adapt(small.llama(), Adaptation(top=4))


@pytest.fixture
def run(tmp_path, monkeypatch, tokenizer):
    """A whole run on tiny everything."""
    monkeypatch.setattr(
        command, "load_smollm2", lambda _: (small.llama(), tokenizer)
    )
    monkeypatch.setattr(qa, "load", lambda *_: small.questions())
    task = command.Task(
        noise=0.3,
        train=4,
        validation=2,
        test=2,
        shifted=3,
        asked=(0, 1),
        distractors=1,
    )
    return command.FineTune(
        task=task,
        adaptation=FILTER,
        train=FineTuneConfig(batch_size=2),
        cache=tmp_path / "states",
        output=tmp_path / "result.json",
        quiet=True,
    )


def test_a_run_from_its_options_to_its_result(run, capsys):
    command.execute(run)
    found = json.loads(run.output.read_text())
    assert found["adaptation"]["variant"] == "kalman"
    assert found["steps" if "steps" in found else "history"]
    assert found["precision_parameters"] == 3
    assert len(found["validation"]["each"]["f1"]) == 2
    assert "log_weight" in found["validation k=1"]["by_passage"]
    assert "by_passage" not in found["validation"]
    assert "test" not in found and "shifted" not in found
    assert found["before"]["gain"] != found["after"]["gain"]
    assert found["code"]["source_sha256"] and found["weights"]
    command.execute(run)
    assert "nothing to do" in capsys.readouterr().err
    other = replace(run, train=replace(run.train, seed=1))
    with pytest.raises(RunError, match="another configuration or data"):
        command.execute(other)
    with pytest.raises(RunError, match="no test answers"):
        command.execute(replace(run, evaluate_test=True))


def test_test_questions_are_answered_where_that_is_asked(run):
    command.execute(replace(run, evaluate_test=True))
    found = json.loads(run.output.read_text())
    assert {"test", "test k=1", "shifted"} < found.keys()
    assert "validation" not in found
    assert len(found["shifted"]["each"]["em"]) == 3


def test_the_command_line_is_the_dataclasses():
    given = "--noise 0.3 --loss focal --gamma 1 --variant kalman --gain 0.8"
    found = command.parse([*given.split(), "--evaluate-test"])
    assert found.task.noise == 0.3 and found.train.gamma == 1.0
    assert found.adaptation == Adaptation(variant="kalman", gain=0.8)
    assert found.evaluate_test and found.known is None
    told = command.parse(["known", "--role", "bias"])
    assert told.known == Known("bias")


def test_a_wrong_option_is_told(capsys):
    with pytest.raises(SystemExit):
        command.parse(["--variant", "gru"])
    assert "variant" in capsys.readouterr().err
