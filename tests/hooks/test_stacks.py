"""Encoder and decoder: each is read by its own mask, in every way that such a model is called."""

import pytest
import torch
import transformers
from torch import nn

from pca_torch.hooks import capture
from pca_torch.selection import REASONS, TokenSelection
from pca_torch.sites import find_sites
from pca_torch.sites.names import stacks
from tests.families import HEADS, HIDDEN, LAYERS, MLP, VOCAB, build
from tests.hooks.models import Copying, Recorder, seeded, tiny

B, T = 3, 6
DRAW = torch.Generator().manual_seed(3)
IDS = torch.randint(5, VOCAB, (B, T), generator=DRAW)
TO = torch.randint(5, VOCAB, (B, T), generator=DRAW)  # as long as what is read: shapes tell nothing
READ = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0], [1] * 6])
WRITE = torch.tensor([[1, 1, 0, 0, 0, 0], [1] * 6, [1, 1, 1, 0, 0, 0]])
BATCH = {"input_ids": IDS, "attention_mask": READ, "decoder_input_ids": TO}
SIZES = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": MLP,
    "decoder_ffn_dim": MLP,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def t5():
    return build("t5")[0]


def translator():
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=HIDDEN,
        d_kv=8,
        d_ff=MLP,
        num_layers=LAYERS,
        num_heads=HEADS,
        decoder_start_token_id=0,
    )
    return seeded(lambda: transformers.T5ForConditionalGeneration(config).eval())


def bart():
    config = transformers.BartConfig(**SIZES, max_position_embeddings=64, decoder_start_token_id=2)
    return seeded(lambda: transformers.BartForConditionalGeneration(config).eval())


def berts():
    half = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": MLP,
    }
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**half), transformers.BertConfig(**half)
    )
    return seeded(lambda: transformers.EncoderDecoderModel(config).eval())


def whisper():
    config = transformers.WhisperConfig(
        **SIZES,
        num_mel_bins=8,
        max_source_positions=T,
        max_target_positions=64,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return seeded(lambda: transformers.WhisperModel(config).eval())


def everything(model, paths, call):
    """All that the modules at `paths` return, (B, T, D) for each time."""
    seen = {path: [] for path in paths}

    def keep(path):
        def hook(module, args, out):
            seen[path].append((out[0] if isinstance(out, tuple) else out).detach().clone())

        return hook

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    with torch.no_grad():
        call()
    for handle in handles:
        handle.remove()
    return seen


def captured(model, paths, call, **options):
    sinks = {path: Recorder() for path in paths}
    with torch.no_grad(), capture(model, sinks, **options):
        call()
    return {path: sink.rows for path, sink in sinks.items()}


def halves(model):
    """Paths of the last block of either stack."""
    blocks = [site.path for site in find_sites(model, "resid")]
    inside = [set(stack.modules()) for stack in stacks(model)]
    return [next(p for p in reversed(blocks) if model.get_submodule(p) in parts) for parts in inside]


def counts(**found):
    return dict.fromkeys((*REASONS, "kept"), 0) | found


# ---------------------------------------------------------------- masks
@pytest.mark.parametrize("given", [True, False], ids=["mask of the decoder", "none"])
@pytest.mark.parametrize("by", ["attention_mask", TokenSelection, None])
@pytest.mark.parametrize("make", [t5, translator, bart, berts])
def test_each_stack_is_read_by_its_own_mask(make, by, given):
    model = make()
    assert len(stacks(model)) == 2
    batch = BATCH | ({"decoder_attention_mask": WRITE} if given else {})
    paths = halves(model)
    seen = everything(model, paths, lambda: model(**batch))
    rows = captured(model, paths, lambda: model(**batch), mask=by() if by is TokenSelection else by)
    real = torch.ones(B, T, dtype=torch.bool)
    masks = [real, real] if by is None else [READ.bool(), WRITE.bool() if given else real]
    for path, mask in zip(paths, masks, strict=True):
        assert torch.equal(rows[path], seen[path][0][mask])


def test_the_name_of_the_other_mask_means_the_same():
    model, batch = t5(), BATCH | {"decoder_attention_mask": WRITE}
    paths = halves(model)
    want = captured(model, paths, lambda: model(**batch))
    for mask in ("decoder_attention_mask", TokenSelection(padding="decoder_attention_mask")):
        got = captured(model, paths, lambda: model(**batch), mask=mask)
        assert all(torch.equal(got[path], want[path]) for path in paths)


def test_a_stack_called_alone():
    model = t5()
    selection, path = TokenSelection(drop_first=1), halves(model)[0]
    (want,) = everything(model, [path], lambda: model.encoder(IDS, READ))[path]
    rows = captured(model, [path], lambda: model.encoder(IDS, READ), mask=selection)[path]
    kept = READ.bool() & (READ.cumsum(1) > 1)
    assert torch.equal(rows, want[kept])
    inside = captured(model.encoder, ["block.1"], lambda: model.encoder(IDS, READ))["block.1"]
    assert torch.equal(inside, want[READ.bool()])


def test_what_follows_the_stacks_has_the_tokens_of_the_decoder():
    model, batch = translator(), BATCH | {"decoder_attention_mask": WRITE}
    want = everything(model, ["lm_head"], lambda: model(**batch))["lm_head"][0]
    rows = captured(model, ["lm_head", ""], lambda: model(**batch))
    assert torch.equal(rows["lm_head"], want[WRITE.bool()])
    assert torch.equal(rows[""], want[WRITE.bool()])


@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (t5, [f"decoder.block.1.layer.1.EncDecAttention.{p}" for p in ("k", "v", "q")]),
        (bart, [f"model.decoder.layers.1.encoder_attn.{p}_proj" for p in "kvq"]),
        (berts, [f"decoder.bert.encoder.layer.1.crossattention.self.{p}" for p in ("key", "value", "query")]),
    ],
)
def test_keys_and_values_of_cross_attention_are_of_what_was_read(make, paths):
    model, batch = make(), BATCH | {"decoder_attention_mask": WRITE}
    seen = everything(model, paths, lambda: model(**batch))
    for by in ("attention_mask", TokenSelection()):
        rows = captured(model, paths, lambda: model(**batch), mask=by)
        for path, mask in zip(paths, (READ, READ, WRITE), strict=True):
            assert torch.equal(rows[path], seen[path][0][mask.bool()])


@pytest.mark.parametrize("by", ["attention_mask", TokenSelection()])
@pytest.mark.parametrize("length", [T, T + 3])
def test_cross_attention_of_a_decoder_that_is_a_model_of_its_own(by, length):
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        intermediate_size=MLP,
        is_decoder=True,
        add_cross_attention=True,
    )
    model = seeded(lambda: transformers.BertLMHeadModel(config).eval())
    states = torch.randn(B, length, HIDDEN, generator=torch.Generator().manual_seed(1))
    read = torch.ones(B, length, dtype=torch.long)
    read[:, 2:5] = 0
    batch = {"input_ids": TO, "attention_mask": WRITE, "encoder_hidden_states": states}
    paths = [f"bert.encoder.layer.0.crossattention.self.{name}" for name in ("key", "value", "query")]
    for given, kept in ({"encoder_attention_mask": read}, read.bool()), ({}, torch.ones_like(read).bool()):
        seen = everything(model, paths, lambda given=given: model(**batch, **given))
        rows = captured(model, paths, lambda given=given: model(**batch, **given), mask=by)
        for path, mask in zip(paths, (kept, kept, WRITE.bool()), strict=True):
            assert torch.equal(rows[path], seen[path][0][mask])


def test_an_encoding_that_was_made_before():
    model, paths = t5(), ["decoder.block.1", "decoder.block.1.layer.1.EncDecAttention.k"]
    with torch.no_grad():
        encoded = model.encoder(IDS, READ)
    batch = {"encoder_outputs": encoded, "attention_mask": READ, "decoder_input_ids": TO}
    seen = everything(model, paths, lambda: model(**batch))
    rows = captured(model, paths, lambda: model(**batch))
    assert torch.equal(rows[paths[0]], seen[paths[0]][0].flatten(0, 1))
    assert torch.equal(rows[paths[1]], seen[paths[1]][0][READ.bool()])


@pytest.mark.parametrize("make", [translator, bart])
def test_generate_reads_the_encoder_once_and_every_step(make):
    model, selection = make(), TokenSelection(drop_first=1)
    paths = halves(model)

    def call():
        model.generate(
            IDS, attention_mask=READ, max_new_tokens=3, min_new_tokens=3, do_sample=False, num_beams=1
        )

    seen = everything(model, paths, call)
    rows = captured(model, paths, call)
    assert len(seen[paths[0]]) == 1
    assert len(seen[paths[1]]) > 1
    assert torch.equal(rows[paths[0]], seen[paths[0]][0][READ.bool()])
    assert torch.equal(rows[paths[1]], torch.cat([x.flatten(0, 1) for x in seen[paths[1]]]))
    captured(model, paths, call, mask=selection)
    steps = len(seen[paths[1]])
    kept = int(READ.sum()) - B + B * (steps - 1)
    assert selection.counts == counts(padding=int((1 - READ).sum()), first=2 * B, kept=kept)


def test_sound_is_no_token_and_the_words_are():
    model = whisper()
    sound = torch.randn(B, 8, 2 * T, generator=torch.Generator().manual_seed(1))
    batch = {"input_features": sound, "decoder_input_ids": TO, "decoder_attention_mask": WRITE}
    paths = halves(model)
    seen = everything(model, paths, lambda: model(**batch))
    selection = TokenSelection(drop_first=1)
    for by, mask in (("attention_mask", WRITE.bool()), (selection, WRITE.bool() & (WRITE.cumsum(1) > 1))):
        rows = captured(model, paths, lambda: model(**batch), mask=by)
        assert torch.equal(rows[paths[0]], seen[paths[0]][0].flatten(0, 1))
        assert torch.equal(rows[paths[1]], seen[paths[1]][0][mask])
    assert selection.counts == counts(padding=int((1 - WRITE).sum()), first=B, kept=int(WRITE.sum()) - B)


def test_in_one_graph_as_without():
    torch.compiler.reset()
    model, batch = t5(), BATCH | {"decoder_attention_mask": WRITE, "use_cache": False}
    paths = halves(model)
    want = captured(model, paths, lambda: model(**batch), mask=TokenSelection())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    got = captured(model, paths, lambda: compiled(**batch), mask=(selection := TokenSelection()))
    torch.compiler.reset()
    assert all(torch.equal(got[path], want[path]) for path in paths)
    assert selection.counts["kept"] == int(READ.sum() + WRITE.sum())


def test_sharing_and_an_early_stop():
    model, batch = t5(), BATCH | {"decoder_attention_mask": WRITE}
    names = [site.name for site in find_sites(model, ["resid", "resid_pre"])]
    seen = captured(model, names, lambda: model(**batch))
    for side in ("encoder", "decoder"):  # an encoder alone ends the forward before its decoder
        sinks = {name: Copying() for name in names if name.startswith(side)}
        with torch.no_grad(), capture(model, sinks, share=True, stop_early=True) as run:
            for _ in range(2):
                run.run(model, **batch)
        assert run.shared == {f"{side}.block.1:input": f"{side}.block.0:output"}
        for name in sinks.keys() - run.shared.keys():
            assert torch.equal(sinks[name].rows, seen[name].repeat(2, 1))


# ---------------------------------------------------------------- what a batch says of each token
def test_roles_and_masks_of_either_side():
    model, batch = t5(), BATCH | {"decoder_attention_mask": WRITE}
    batch |= {
        "roles": IDS % 2,
        "decoder_roles": TO % 3,
        "token_mask": READ.flip(1),
        "decoder_token_mask": TO > 20,
    }
    selection, paths = TokenSelection(roles={1}), halves(model)
    seen = everything(model, paths, lambda: model(**BATCH, decoder_attention_mask=WRITE))
    rows = captured(model, paths, lambda: model(**selection.split(batch, model)), mask=selection)
    kept = (
        READ.bool() & (IDS % 2 == 1) & READ.flip(1).bool(),
        WRITE.bool() & (TO % 3 == 1) & (TO > 20),
    )
    for path, keep in zip(paths, kept, strict=True):
        assert int(keep.sum()) > 0
        assert torch.equal(rows[path], seen[path][0][keep])
    assert selection.counts["kept"] == sum(int(keep.sum()) for keep in kept)


@pytest.mark.parametrize("make", [t5, translator])
def test_labels_are_of_the_decoder(make):
    """Taken out of the batch where the forward has no parameter for them, seen in the call where it has."""
    model, selection = make(), TokenSelection(labels=True)
    batch = BATCH | {"labels": torch.where(WRITE.bool(), TO, -100)}
    paths = halves(model)
    seen = everything(model, paths, lambda: model(**BATCH))
    rows = captured(model, paths, lambda: model(**selection.split(batch, model)), mask=selection)
    assert torch.equal(rows[paths[0]], seen[paths[0]][0][READ.bool()])
    assert torch.equal(rows[paths[1]], seen[paths[1]][0][WRITE.bool()])


def test_roles_of_one_side_alone_are_not_enough():
    model, selection = t5(), TokenSelection(roles={1})
    batch = BATCH | {"roles": IDS % 2}
    with (
        pytest.raises(ValueError, match=r"`roles` needs the role of each token.*'decoder_roles'"),
        capture(model, {halves(model)[0]: Recorder()}, mask=selection),
    ):
        model(**selection.split(batch, model))


def test_what_a_stopped_forward_left_is_not_of_the_next():
    model, selection = translator(), TokenSelection(labels=True)
    path = halves(model)[0]
    with torch.no_grad(), capture(model, {path: Recorder()}, mask=selection, stop_early=True) as run:
        for _ in range(2):  # the second ends in the encoder
            run.run(model, **BATCH, labels=torch.full((B, T), -100))
    captured(model, [path], lambda: model(**BATCH), mask=selection)
    assert selection.counts["label"] == B * T  # of the first forward alone


# ---------------------------------------------------------------- which models have both
def test_models_without_both_have_no_stacks():
    assert stacks(tiny()) == []
    assert stacks(t5().encoder) == []
    assert stacks(nn.Transformer(8, 2, 1, 1, batch_first=True)) == []
    model = bart()
    assert stacks(model) == [model.model.encoder, model.model.decoder]
    assert stacks(nn.ModuleDict({"module": model})) == stacks(model)
