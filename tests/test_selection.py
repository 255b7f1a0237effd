"""Which tokens count, judged token by token in plain Python; and which rows a sink gets by it."""

import copy
import functools
import inspect
import json
import pickle

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM

from pca_torch.hooks import capture
from pca_torch.selection import REASONS, TokenSelection, special_ids_of
from tests.hooks.models import tiny
from tests.tiny_model import tiny_tokenizer

PARAMETERS = inspect.signature(LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in PARAMETERS else "past_key_values"
LEFT = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
IDS = torch.tensor([[9, 9, 1, 5, 6], [1, 5, 2, 7, 8], [9, 9, 9, 9, 1]])


class Model(nn.Module):
    """Takes what a language model takes and computes nothing."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **rest):
        pass


class Wrapper(nn.Module):
    """Passes on what it gets without a name for it, as DistributedDataParallel does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)


class Labelled(Model):
    """Has a parameter for labels."""

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        pass


class Past:
    """A cache that has seen `n` tokens."""

    def __init__(self, n):
        self.n = n

    def get_seq_length(self, layer_idx=0):
        return self.n


def select(selection, **kwargs):
    return selection(Model(), (), kwargs)


def counted(**counts):
    return dict.fromkeys((*REASONS, "kept"), 0) | counts


def even(ids, places):
    return ids % 2 == 0


@pytest.fixture(scope="module")
def llama():
    return tiny()


# ---------------------------------------------------------------- against a loop over tokens
def by_hand(row, settings):
    """Places and reasons of the tokens of one sequence row, one token after the other."""
    places, reasons, place = [], [], -1
    for t, (token, real, starts) in enumerate(zip(row["ids"], row["real"], row["starts"], strict=True)):
        if starts:
            place = -1
        if not real:
            places.append(-1)
            reasons.append("padding")
            continue
        place += 1
        places.append(place)
        tests = {
            "label": settings["labels"] and row["labels"][t] == -100,
            "special": token in settings["special_ids"],
            "first": place < settings["drop_first"],
            "role": settings["roles"] is not None and row["roles"][t] not in settings["roles"],
            "mask": not row["mask"][t],
            "predicate": settings["predicate"] is not None and token % 2 != 0,
        }
        reasons.append(next((reason for reason, out in tests.items() if out), "kept"))
    return places, reasons


def random_row(draw, length, side):
    """Documents one behind the other with restarting positions, padding at one side."""
    n_pad = draw(0, length - 1)
    positions, starts = [], []
    while len(positions) < length - n_pad:
        size = draw(1, 4)
        positions += range(size)
        starts += [True] + [False] * (size - 1)
    positions, starts = positions[: length - n_pad], starts[: length - n_pad]
    pad = [False] * n_pad
    left = side == "left"
    row = {
        "starts": pad + starts if left else starts + pad,
        "positions": [1] * n_pad + positions if left else positions + [1] * n_pad,
        "real": pad + [True] * len(positions) if left else [True] * len(positions) + pad,
        "ids": [draw(0, 7) for _ in range(length)],
        "labels": [draw(0, 1) * 105 - 100 for _ in range(length)],
        "roles": [draw(0, 2) for _ in range(length)],
        "mask": [draw(0, 3) > 0 for _ in range(length)],
    }
    return row


@pytest.mark.parametrize("seed", range(60))
def test_every_token_is_judged_as_by_hand(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    settings = {
        "labels": bool(draw(0, 1)),
        "special_ids": {draw(0, 7) for _ in range(draw(0, 2))},
        "drop_first": draw(0, 2),
        "roles": [None, {1}, {0, 2}][draw(0, 2)],
        "predicate": [None, even][draw(0, 1)],
    }
    side, length = ["left", "right"][draw(0, 1)], draw(1, 12)
    rows = [random_row(draw, length, side) for _ in range(draw(1, 4))]
    columns = {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}
    batch = {
        "input_ids": columns["ids"],
        "attention_mask": columns["real"].long(),
        "position_ids": columns["positions"],
        "labels": columns["labels"],
        "roles": columns["roles"],
        "token_mask": columns["mask"].float(),
    }
    before = copy.deepcopy(batch)
    selection, model = TokenSelection(**settings), Model()
    for times in (1, 2):
        keep = selection(model, (), selection.split(batch, model))
        judged = [by_hand(row, settings) for row in rows]
        reasons = [reason for _, row in judged for reason in row]
        assert keep.dtype == torch.bool
        assert keep.flatten().tolist() == [reason == "kept" for reason in reasons]
        assert selection.positions.tolist() == [places for places, _ in judged]
        assert selection.counts == {name: times * reasons.count(name) for name in (*REASONS, "kept")}
        assert sum(selection.counts.values()) == times * len(rows) * length
    assert all(torch.equal(batch[key], value) for key, value in before.items())
    assert batch.keys() == before.keys()


# ---------------------------------------------------------------- where a sequence begins
def test_left_padding_does_not_count_among_the_first():
    selection = TokenSelection(drop_first=1)
    keep = select(selection, input_ids=IDS, attention_mask=LEFT)
    assert keep.long().tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]]
    assert selection.positions.tolist() == [[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4], [-1, -1, -1, -1, 0]]
    assert selection.counts == counted(padding=6, first=3, kept=6)


@pytest.mark.parametrize("places", [[0, 1, 2, 0, 1], [7, 8, 9, 3, 4]])
def test_one_row_of_position_ids_packs_every_sequence(places):
    selection = TokenSelection(drop_first=1)
    keep = select(selection, input_ids=IDS, position_ids=torch.tensor([places]))
    assert keep.tolist() == [[False, True, True, False, True]] * 3
    assert selection.positions.tolist() == [[0, 1, 2, 0, 1]] * 3


def test_positions_that_leap_begin_no_sequence():
    selection = TokenSelection(drop_first=1)
    select(selection, input_ids=IDS, position_ids=torch.tensor([[0, 1, 5, 6, 9]]))
    assert selection.counts == counted(first=3, kept=12)


def test_padding_inside_a_sequence_does_not_split_it():
    selection = TokenSelection(drop_first=1)
    holes = {
        "attention_mask": torch.tensor([[1, 1, 0, 1, 1]]),
        "position_ids": torch.tensor([[0, 1, 1, 2, 3]]),
    }
    select(selection, input_ids=IDS[:1], **holes)
    assert selection.positions.tolist() == [[0, 1, -1, 2, 3]]
    assert selection.counts == counted(padding=1, first=1, kept=3)


def test_a_restart_ends_the_sequence_that_went_on_from_the_cache():
    selection = TokenSelection()
    places = torch.tensor([[6, 7, 0, 1, 2]])
    select(selection, input_ids=IDS, position_ids=places, past_key_values=Past(6))
    assert torch.equal(selection.positions, places.expand(3, 5))


def test_positions_of_several_axes_tell_nothing():
    selection = TokenSelection(drop_first=1)
    select(selection, input_ids=IDS, position_ids=torch.zeros(3, 3, 5, dtype=torch.long))
    assert selection.counts == counted(first=3, kept=12)


@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
@pytest.mark.parametrize("length", [2, torch.tensor(2)])
def test_without_a_mask_the_cache_knows_the_past(argument, length):
    selection = TokenSelection(drop_first=3)
    keep = select(selection, input_ids=IDS[:, :2], **{argument: Past(length)})
    assert keep.tolist() == [[False, True]] * 3
    assert selection.positions.tolist() == [[2, 3]] * 3


def test_with_a_mask_the_past_is_what_it_marks():
    selection = TokenSelection(drop_first=2)
    keep = select(selection, input_ids=IDS[:, -1:], attention_mask=LEFT, past_key_values=Past(4))
    assert keep.flatten().tolist() == [True, True, False]
    assert selection.positions.flatten().tolist() == [2, 4, 0]


# ---------------------------------------------------------------- what is a forward with tokens
def test_without_settings_only_padding_is_left_out():
    selection = TokenSelection()
    assert torch.equal(select(selection, input_ids=IDS, attention_mask=LEFT), LEFT.bool())
    assert select(selection, input_ids=IDS).all()
    assert selection.counts == counted(padding=6, kept=9 + 15)


def test_padding_by_another_name_and_by_none():
    selection = TokenSelection(padding="real")
    assert torch.equal(select(selection, input_ids=IDS, real=LEFT), LEFT.bool())
    assert select(TokenSelection(padding=None), input_ids=IDS, attention_mask=LEFT[None]).all()


def test_embeddings_and_their_padding():
    selection = TokenSelection(drop_first=1)
    keep = select(selection, inputs_embeds=torch.zeros(3, 5, 4), attention_mask=LEFT)
    assert keep.long().tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]]


def test_a_forward_with_a_mask_and_no_sequence():
    class Net(nn.Module):
        def forward(self, x, attention_mask=None):
            pass

    selection = TokenSelection()
    assert torch.equal(selection(Net(), (torch.zeros(15, 4), LEFT), {}), LEFT.bool())
    assert torch.equal(selection(Net(), (torch.zeros(3, 5, 4), LEFT), {}), LEFT.bool())
    assert selection.counts == counted(padding=12, kept=18)


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 8, 16), (4, 5)])
def test_a_forward_without_tokens_keeps_every_row(shape):
    selection = TokenSelection()
    select(selection, input_ids=IDS)
    assert selection(nn.Flatten(), (torch.zeros(shape),), {}) is None
    assert selection.counts == counted(kept=15)
    assert selection.positions is None


def test_a_setting_needs_tokens():
    with pytest.raises(ValueError, match=r"`mask` selects tokens, but Flatten was called with neither ids"):
        TokenSelection(drop_first=1)(nn.Flatten(), (torch.zeros(4, 5),), {})


class Pictures(nn.Module):
    """A model of pictures with a part that callers may call, as transformers has."""

    def __init__(self):
        super().__init__()
        self.base_model = Model()

    def forward(self, pixel_values=None, attention_mask=None):
        pass


@pytest.mark.parametrize("model", [nn.Flatten(), Pictures()], ids=["one module", "with a base model"])
@pytest.mark.parametrize("settings", [{}, {"labels": True}, {"roles": {1}}, {"drop_first": 1}])
def test_what_a_batch_says_of_tokens_needs_tokens(model, settings):
    name = next(iter(inspect.signature(model.forward).parameters))
    batch = {name: torch.zeros(2, 3, 8, 8), "token_mask": LEFT, "roles": LEFT, "labels": LEFT}
    selection = TokenSelection(**settings)
    with pytest.raises(ValueError, match=r"`mask` selects tokens, but \w+ was called.*no `token_mask`"):
        selection(model, (), selection.split(batch, model))
    selection = TokenSelection()
    assert torch.equal(select(selection, input_ids=IDS), torch.ones(3, 5, dtype=torch.bool))


def test_labels_of_pictures_are_of_no_token():
    selection, model = TokenSelection(), Pictures()
    batch = {"pixel_values": torch.zeros(2, 3, 8, 8), "labels": torch.zeros(2, dtype=torch.long)}
    assert selection(model, (), selection.split(batch, model)) is None


def test_a_mask_beside_any_sequence_of_vectors():
    class Net(nn.Module):
        def forward(self, x):
            pass

    selection, net = TokenSelection(), Net()
    keep = selection(net, (), selection.split({"x": torch.zeros(3, 5, 4), "token_mask": LEFT}, net))
    assert torch.equal(keep, LEFT.bool())


@pytest.mark.parametrize(
    "call", [{"input_ids": IDS, "attention_mask": 2 * LEFT}, {"input_ids": IDS[:, :4]}, {"x": torch.ones(3)}]
)
def test_what_a_refused_forward_was_given_is_not_for_the_next(call):
    selection, model = TokenSelection(), Model()
    selection.split({"token_mask": LEFT}, model)
    with pytest.raises(ValueError, match=r"`(attention_mask|token_mask|mask)`"):
        selection(model, (), call)
    assert select(selection, input_ids=IDS).all()


def test_a_wrapper_leaves_it_to_the_module_inside():
    model, selection = Wrapper(Labelled()), TokenSelection(drop_first=1)
    assert selection(model, (IDS, LEFT), {}) is None  # who knows that the second is the mask?
    keep = selection(model, (), {"input_ids": IDS, "attention_mask": LEFT})
    assert torch.equal(keep, selection(model.module, (IDS, LEFT), {}))
    assert sum(selection.counts.values()) == 30


# ---------------------------------------------------------------- what comes beside the batch
def test_split_takes_what_the_forward_has_no_parameter_for():
    selection = TokenSelection(labels=True, roles={1}, mask_argument="assistant_masks")
    batch = {key: torch.ones(3, 5, dtype=torch.long) for key in ("input_ids", "labels", "roles", "other")}
    batch |= {"assistant_masks": LEFT, "roles": LEFT}
    assert list(selection.split(batch, Model())) == ["input_ids", "other"]
    assert list(selection.split(batch, Wrapper(Labelled()))) == ["input_ids", "labels", "other"]
    assert len(batch) == 5


def test_labels_of_the_forward_and_of_the_batch():
    labels = torch.where(LEFT.bool(), IDS, -100)
    for model in (Labelled(), Model()):
        selection = TokenSelection(labels=True)
        keep = selection(model, (), selection.split({"input_ids": IDS, "labels": labels}, model))
        assert torch.equal(keep, LEFT.bool())
        assert selection.counts == counted(label=6, kept=9)
        assert selection(model, (), {"input_ids": IDS, "labels": None}).all()  # a decoding step has none


def test_an_argument_that_is_none_does_not_hide_what_the_batch_says():
    selection, model = TokenSelection(labels=True), Model()
    batch = {"input_ids": IDS, "labels": torch.where(LEFT.bool(), IDS, -100)}
    assert torch.equal(selection(model, (), selection.split(batch, model) | {"labels": None}), LEFT.bool())


def test_another_label_for_none():
    selection = TokenSelection(labels=True, label_mask_value=9)
    assert torch.equal(select(selection, input_ids=IDS, labels=IDS), IDS != 9)


def test_what_comes_beside_is_for_one_forward():
    selection, model = TokenSelection(roles={1}), Model()
    selection(model, (), selection.split({"input_ids": IDS, "roles": LEFT}, model))
    with pytest.raises(ValueError, match=r"`roles` needs the role of each token.*'roles'; have it in each"):
        select(selection, input_ids=IDS)


def test_a_mask_of_the_caller_is_a_reason_of_its_own():
    selection, model = TokenSelection(), Model()
    keep = selection(model, (), selection.split({"input_ids": IDS, "token_mask": LEFT.float()}, model))
    assert torch.equal(keep, LEFT.bool())
    assert selection.counts == counted(mask=6, kept=9)


# ---------------------------------------------------------------- settings, counts, text
def test_counts_of_two_selections_add_up():
    one, two = TokenSelection(drop_first=1), TokenSelection(drop_first=1)
    for selection in (one, two, two):
        select(selection, input_ids=IDS, attention_mask=LEFT)
    one.merge(two.counts)
    one.merge({"kept": 1})
    assert one.counts == counted(padding=18, first=9, kept=19)
    assert two.counts == counted(padding=12, first=6, kept=12)


def test_settings_are_json():
    settings = {"labels": True, "special_ids": {5, 1}, "drop_first": 2, "roles": [2, 0], "predicate": even}
    assert json.loads(json.dumps(TokenSelection(**settings).describe())) == {
        "padding": "attention_mask",
        "labels": True,
        "label_mask_value": -100,
        "special_ids": [1, 5],
        "drop_first": 2,
        "roles": [0, 2],
        "predicate": "even",
    }
    assert TokenSelection(predicate=functools.partial(even)).describe()["predicate"] == "partial"
    assert TokenSelection().describe()["predicate"] is None


def test_a_selection_survives_pickle_and_deepcopy():
    selection = TokenSelection(drop_first=1, predicate=even)
    select(selection, input_ids=IDS)
    for twin in (pickle.loads(pickle.dumps(selection)), copy.deepcopy(selection)):
        select(twin, input_ids=IDS)
        assert twin.counts["first"] == 6
    assert selection.counts["first"] == 3


def test_counting_goes_on_after_inference_mode():
    selection = TokenSelection(drop_first=1)
    with torch.inference_mode():
        ids = IDS.clone()
        keep = select(selection, input_ids=ids, attention_mask=LEFT.clone())
    assert not keep.is_inference()
    select(selection, input_ids=IDS, attention_mask=LEFT)
    assert selection.counts == counted(padding=12, first=6, kept=12)


def test_special_ids_are_those_of_the_tokenizer_and_the_markers_added_to_it():
    from tokenizers import AddedToken

    tokenizer = tiny_tokenizer()
    eos = tokenizer.eos_token_id
    assert special_ids_of(tokenizer) == {eos}
    tokenizer.add_tokens([AddedToken("<|user|>", special=True), AddedToken("word", special=False)])
    assert special_ids_of(tokenizer) == {eos, tokenizer.convert_tokens_to_ids("<|user|>")}


def test_a_chat_template_makes_the_mask():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    said = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": " sat on the mat"}]
    batch = tokenizer.apply_chat_template(
        said, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
    )
    selection, model = TokenSelection(mask_argument="assistant_masks"), Model()
    keep = selection(model, (), selection.split(batch, model))
    assert tokenizer.decode(batch["input_ids"][keep]) == " sat on the mat"
    assert selection.counts["mask"] > 0


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"labels": 1.0}, ValueError, "`labels` must be True or False, got 1.0"),
        ({"drop_first": -1}, ValueError, "`drop_first` must be an integer ≥ 0, got -1"),
        ({"drop_first": True}, ValueError, "`drop_first` must be an integer ≥ 0, got True"),
        ({"special_ids": 3}, ValueError, "`special_ids` must be a collection of integers, got 3"),
        ({"special_ids": "<s>"}, ValueError, "`special_ids` must be a collection of integers, got '<s>'"),
        ({"special_ids": [0.5]}, ValueError, r"`special_ids` must be an integer ≥ 0, got 0\.5"),
        ({"roles": ["user"]}, ValueError, "`roles` must be an integer ≥ 0, got 'user'"),
        ({"roles": []}, ValueError, "`roles` must be None or hold a role, got none"),
        ({"predicate": 3}, TypeError, "`predicate` must be callable or None, got int"),
        ({"padding": 0}, ValueError, "`padding` must be an argument's name or None, got 0"),
    ],
)
def test_settings_out_of_range(settings, error, match):
    with pytest.raises(error, match=match):
        TokenSelection(**settings)


@pytest.mark.parametrize(
    ("settings", "kwargs", "match"),
    [
        (
            {},
            {"attention_mask": LEFT[None]},
            r"`attention_mask` must be a 2-D tensor .* got shape \(1, 3, 5\)",
        ),
        ({}, {"attention_mask": {"full": LEFT}}, "`attention_mask` must be a 2-D tensor .* got dict"),
        (
            {},
            {"attention_mask": LEFT[:, :4]},
            r"`attention_mask` must have the shape \(3, 5\).* got \(3, 4\)",
        ),
        ({}, {"attention_mask": LEFT[:1]}, r"`attention_mask` must have the shape \(3, 5\).* got \(1, 5\)"),
        ({}, {"attention_mask": 2 * LEFT}, "`attention_mask` must hold 0 and 1 only.*`position_ids` restart"),
        ({}, {"token_mask": IDS}, "`token_mask` must hold 0 and 1 only"),
        ({}, {"token_mask": LEFT[0]}, r"`token_mask` must have one value per token, \(3, 5\),.* \(5,\)"),
        ({"labels": True}, {"labels": IDS[:, 0]}, r"`labels` must have one value per token, .* shape \(3,\)"),
        ({"roles": {1}}, {"roles": [1, 2]}, "`roles` must have one value per token, .* got list"),
        ({"predicate": lambda i, p: i}, {}, r"`predicate` must return booleans .*\(3, 5\), got torch.int64"),
        ({"predicate": lambda i, p: True}, {}, r"`predicate` must return booleans .*\(3, 5\), got bool"),
    ],
)
def test_a_batch_that_does_not_fit(settings, kwargs, match):
    selection = TokenSelection(**settings)
    with pytest.raises(ValueError, match=match):
        select(selection, input_ids=IDS, **kwargs)
    assert selection.counts == counted()  # a refused batch is not counted


@pytest.mark.parametrize("setting", [{"special_ids": {1}}, {"predicate": even}])
def test_embeddings_have_no_ids(setting):
    with pytest.raises(ValueError, match=f"`{next(iter(setting))}` needs token ids, but the forward got emb"):
        select(TokenSelection(**setting), inputs_embeds=torch.zeros(3, 5, 4))


def test_a_mask_that_is_none_for_a_forward_without_a_sequence():
    with pytest.raises(ValueError, match=r"`attention_mask` must be a 2-D tensor .* got shape \(1, 3, 5\)"):
        select(TokenSelection(), x=torch.zeros(15, 4), attention_mask=LEFT[None])
    with pytest.raises(ValueError, match=r"`attention_mask` must be a 2-D tensor .* got dict"):
        select(TokenSelection(), x=torch.zeros(15, 4), attention_mask={})


def test_what_split_takes_must_be_a_tensor():
    with pytest.raises(ValueError, match=r"`roles` must be a tensor \(B, T\), got list; make it one"):
        TokenSelection(roles={1}).split({"input_ids": IDS, "roles": [[1]]}, Model())


def test_a_tokenizer_is_needed_for_its_special_ids():
    with pytest.raises(TypeError, match="`tokenizer` must be a transformers tokenizer, got str"):
        special_ids_of("gpt2")


# ---------------------------------------------------------------- through `capture`
def captured(model, selection, run, site="model.layers.1"):
    """The rows of a site that `selection` lets through."""
    rows = []
    with torch.no_grad(), capture(model, {site: rows.append}, mask=selection):
        run()
    return torch.cat(rows)


def every_row(model, run, site="model.layers.1"):
    """What the site returned in each forward, as it was."""
    seen = []
    handle = model.get_submodule(site).register_forward_hook(lambda m, a, out: seen.append(out.clone()))
    with torch.no_grad():
        run()
    handle.remove()
    return seen


@pytest.mark.parametrize("flip", [False, True])
def test_the_rows_of_a_padded_forward(llama, flip):
    mask, ids = (LEFT.flip(1), IDS.flip(1)) if flip else (LEFT, IDS)
    selection = TokenSelection(special_ids={5})

    def run():
        llama(input_ids=ids, attention_mask=mask)

    (out,) = every_row(llama, run)
    wanted = [out[b, t] for b in range(3) for t in range(5) if mask[b, t] and ids[b, t] != 5]
    assert torch.equal(captured(llama, selection, run), torch.stack(wanted))
    assert selection.counts == counted(
        padding=6, special=2, kept=7
    )  # once: the model and its base were called


def test_generate_counts_prefill_and_steps(llama):
    selection = TokenSelection(drop_first=2)

    def run():
        return llama.generate(
            input_ids=torch.where(LEFT.bool(), IDS, 0), attention_mask=LEFT, max_new_tokens=4, do_sample=False
        )

    prefill, *steps = every_row(llama, run)
    n_real = LEFT.sum(1).tolist()
    wanted = [prefill[b, t] for b in range(3) for t in range(5) if t >= 5 - n_real[b] + 2]
    for past, step in enumerate(steps):
        wanted += [step[b, 0] for b in range(3) if n_real[b] + past >= 2]
    rows = captured(llama, selection, run)
    assert len(steps) == 3
    assert torch.equal(rows, torch.stack(wanted))
    assert selection.counts == counted(padding=6, first=2 + 2 + 2, kept=len(wanted))


def test_special_ids_of_a_step_are_its_own(llama):
    with torch.no_grad():
        generated = llama.generate(input_ids=IDS[1:2], max_new_tokens=5, do_sample=False)[0, 5:]
    common = int(generated[:-1].mode().values)
    selection = TokenSelection(special_ids={common})
    captured(llama, selection, lambda: llama.generate(input_ids=IDS[1:2], max_new_tokens=5, do_sample=False))
    fed = torch.cat([IDS[1], generated[:-1]])  # the last one generated is never fed
    assert selection.counts == counted(special=int((fed == common).sum()), kept=int((fed != common).sum()))


def test_roles_and_mask_of_generate_are_of_the_prefill(llama):
    selection = TokenSelection()
    batch = {
        "input_ids": IDS[1:2],
        "attention_mask": LEFT[1:2],
        "token_mask": torch.tensor([[0, 1, 1, 1, 1]]),
    }
    captured(
        llama,
        selection,
        lambda: llama.generate(**selection.split(batch, llama), max_new_tokens=3, do_sample=False),
    )
    assert selection.counts == counted(mask=1, kept=4 + 2)


def test_a_step_with_a_cache_and_no_mask(llama):
    selection = TokenSelection(drop_first=4)

    def run():
        cache = DynamicCache(config=llama.config)
        llama(input_ids=IDS[:, :3], **{CACHE: cache})
        llama(input_ids=IDS[:, 3:], **{CACHE: cache})

    _, step = every_row(llama, run)
    assert torch.equal(captured(llama, selection, run), step[:, 1])
    assert selection.counts == counted(first=12, kept=3)


def test_a_packed_batch_is_captured_by_document(llama):
    selection = TokenSelection(drop_first=1)
    places = torch.tensor([[0, 1, 0, 1, 2]])

    def run():
        llama(input_ids=IDS[:1], position_ids=places, use_cache=False)

    (out,) = every_row(llama, run)
    assert torch.equal(captured(llama, selection, run), out[0, [1, 3, 4]])
    assert selection.counts == counted(first=2, kept=3)


def test_a_wrapper_called_by_position_is_counted_once(llama):
    model, selection = Wrapper(llama), TokenSelection(drop_first=1)
    (out,) = every_row(llama, lambda: model(IDS, LEFT))
    rows = captured(model, selection, lambda: model(IDS, LEFT))
    assert torch.equal(rows, torch.cat([out[0, 3:], out[1, 1:]]))
    assert selection.counts == counted(padding=6, first=3, kept=6)


class Places:
    """A sink that keeps the places it is told."""

    def __init__(self):
        self.seen = []

    def update(self, x, *, mask=None):
        raise AssertionError("`update_rows` says more")

    def update_rows(self, rows, positions=None):
        self.seen += positions.tolist()


def test_a_sink_is_told_the_places_of_its_rows(llama):
    sink, selection = Places(), TokenSelection(drop_first=1)
    with torch.no_grad(), capture(llama, {"model.layers.0": sink}, mask=selection):
        llama(input_ids=IDS, attention_mask=LEFT)
        llama(input_ids=IDS[:1], position_ids=torch.tensor([[0, 1, 0, 1, 2]]), use_cache=False)
    assert sink.seen == [1, 2, 1, 2, 3, 4, 1, 1, 2]


def test_compiled_with_hooks_it_counts_each_call(llama):
    selection, rows = TokenSelection(drop_first=1, special_ids={5}), []
    compiled = torch.compile(copy.deepcopy(llama), backend="eager", fullgraph=True)
    with torch.no_grad(), capture(compiled, {"model.layers.1": rows.append}, mask=selection):
        for _ in range(2):
            compiled(input_ids=IDS, attention_mask=LEFT, use_cache=False)
    torch.compiler.reset()
    (out,) = every_row(llama, lambda: llama(input_ids=IDS, attention_mask=LEFT))
    keep = [(0, 4), (1, 2), (1, 3), (1, 4)]
    assert torch.equal(torch.cat(rows), torch.stack([out[b, t] for b, t in keep] * 2))
    assert selection.counts == counted(padding=12, special=4, first=6, kept=8)


def test_what_is_told_holds_for_one_forward_whether_it_is_given_that_or_not():
    labels = torch.tensor([[-100, 5, 6]])
    for model in (Labelled(), Model()):
        selection = TokenSelection(labels=True)
        selection.tell({"labels": labels, "other": [1]}, model)
        kwargs = {"input_ids": torch.tensor([[4, 5, 6]])}
        assert selection(model, (), kwargs).tolist() == [[False, True, True]]
        assert selection(model, (), kwargs).tolist() == [[True, True, True]]
        with pytest.raises(ValueError, match="`labels` must be a tensor"):
            selection.tell({"labels": [1, 2]}, model)
