"""Which tokens of a forward count, and for what reason the others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pca_torch._arguments import arguments_by_name
from pca_torch._checks import check_flag, check_whole
from pca_torch.forward_tokens import (
    ForwardTokens,
    as_booleans,
    find_tokens,
    is_any,
    parameters,
    places_of,
)
from pca_torch.sites.names import roots, stacks

__all__ = ["REASONS", "TokenSelection", "special_ids_of"]

REASONS = ("padding", "label", "special", "first", "role", "mask", "predicate")
DECODER = "decoder_"  # begins the names of what a batch says of the tokens of a decoder behind an encoder

Predicate = Callable[[Tensor, Tensor], Tensor]  # ids (B, T), places (B, T) -> booleans (B, T)


@dataclass(kw_only=True, eq=False)
class TokenSelection:
    """The tokens that count; hand it to `capture(model, sinks, mask=selection)`.

    A token that does not count has one reason, the first that holds in the order of `REASONS`; these
    counts and that of the kept ones add up to B·T in each forward. A sequence begins at its first token
    that is no padding, and where 2-D `position_ids` restart, as they do in packed batches. What a
    decoding step follows is known from the attention mask, or else from the cache.

    A forward without tokens, such as that of an image model, keeps every row and counts none. Of a model of
    transformers with encoder and decoder the tokens of both count, by the same settings; labels are those
    of the decoder, and `decoder_roles` and `decoder_token_mask` in a batch speak of its tokens. `generate`
    goes on with pad tokens after a sequence has ended and marks them as real: name them in `special_ids`.

    Args:
        labels: leave out the tokens whose label is `label_mask_value`, where a batch has labels.
        label_mask_value: the label that stands for none.
        special_ids: ids that do not count, see `special_ids_of`; `{tokenizer.bos_token_id}` is BOS alone.
        drop_first: leave out this many tokens at the start of each sequence.
        roles: the roles that count; each batch then says the role of every token, (B, T) integers.
        predicate: says which tokens count, (B, T) booleans, from ids (B, T) and each token's place in its
            sequence (B, T), which is -1 in padding.
        padding: the argument of the forward with 0 at padding, (B, T); None takes all for tokens. An
            encoder and a decoder have one of that name each.
        roles_argument: the key of the roles in a batch.
        mask_argument: the key of one more mask that a batch may bring, (B, T), with 0 at what does not
            count: "assistant_masks" is what a chat template makes.

    Raises:
        ValueError: a setting is out of range.
        TypeError: `predicate` is not callable.
    """

    labels: bool = False
    label_mask_value: int = -100
    special_ids: Iterable[int] = ()
    drop_first: int = 0
    roles: Iterable[int] | None = None
    predicate: Predicate | None = None
    padding: str | None = "attention_mask"
    roles_argument: str = "roles"
    mask_argument: str = "token_mask"
    positions: Tensor | None = field(default=None, init=False)  # (B, T) places, of the last forward
    saw_labels: bool = field(default=False, init=False)  # in any forward
    _beside: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)  # for the next forward
    _has_stacks: bool = field(default=False, init=False, repr=False)  # the forward under way is of both
    _totals: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)
    _merged: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_flag(self.labels, "labels")
        check_whole(self.drop_first, "drop_first", least=0)
        self.special_ids = _whole_numbers(self.special_ids, "special_ids")
        self.roles = None if self.roles is None else _whole_numbers(self.roles, "roles")
        if self.roles == ():
            raise ValueError("`roles` must be None or hold a role, got none, which would leave no token.")
        if self.predicate is not None and not callable(self.predicate):
            raise TypeError(f"`predicate` must be callable or None, got {type(self.predicate).__name__}.")
        if not (self.padding is None or isinstance(self.padding, str)):
            raise ValueError(f"`padding` must be an argument's name or None, got {self.padding!r}.")

    def split(self, batch: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
        """The arguments for the model: the batch without what only says which tokens count.

        Roles, mask and labels are taken out where the model's forward has no parameter of that name, and
        kept for the next forward: `model(**selection.split(batch, model))`. Of `generate` that is the
        prefill; what it generates has no role.

        Args:
            batch: arguments by name; it stays as it is.
            model: the module that will be called.

        Raises:
            ValueError: what is taken out is no tensor.
        """
        taken = self._keys_of(model) - parameters(model)
        self.tell({key: value for key, value in batch.items() if key in taken}, model)
        return {key: value for key, value in batch.items() if key not in taken}

    def tell(self, batch: Mapping[str, Any], model: nn.Module) -> None:
        """Keep roles, mask and labels of a batch for the next forward, which may be given them or not.

        Args:
            batch: by name; what is not about tokens is left alone.
            model: the module that will be called.

        Raises:
            ValueError: what is kept is no tensor.
        """
        self._has_stacks = bool(stacks(model))
        self._beside = {key: batch[key] for key in self._keys_of(model) if batch.get(key) is not None}
        for key, value in self._beside.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"`{key}` must be a tensor (B, T), got {type(value).__name__}; make it one.")

    def _keys_of(self, model: nn.Module) -> set[str]:
        """What a batch for `model` may say of each token, by name."""
        return self._keys("") | (self._keys(DECODER) if stacks(model) else set())

    @property
    def counts(self) -> dict[str, int]:
        """Tokens left out, by reason, and those that count as "kept"."""
        totals = torch.zeros(len(REASONS) + 1, dtype=torch.int64, device="cpu")
        for part in self._totals.values():
            totals += part.cpu()
        names = (*REASONS, "kept")
        return {name: n + self._merged.get(name, 0) for name, n in zip(names, totals.tolist(), strict=True)}

    def merge(self, counts: Mapping[str, int]) -> None:
        """Add the counts of other tokens.

        Args:
            counts: as `counts` gives them, perhaps not all.

        Raises:
            ValueError: a name that is none of them, or no integer ≥ 0.
        """
        names = (*REASONS, "kept")
        for name, n in counts.items():
            if name not in names:
                raise ValueError(f"`counts` must be by the names {', '.join(names)}, got {name!r}.")
            check_whole(n, f"counts[{name!r}]", least=0)
        self._merged = {name: self._merged.get(name, 0) + counts.get(name, 0) for name in names}

    def describe(self) -> dict[str, Any]:
        """The settings as JSON types, for a file; the predicate by its name."""
        name = getattr(self.predicate, "__qualname__", type(self.predicate).__qualname__)
        return {
            "padding": self.padding,
            "labels": self.labels,
            "label_mask_value": self.label_mask_value,
            "special_ids": list(self.special_ids),
            "drop_first": self.drop_first,
            "roles": None if self.roles is None else list(self.roles),
            "predicate": None if self.predicate is None else name,
        }

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Which tokens of a forward count; call it once per forward, since it counts.

        Args:
            module: the module that is called.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Returns:
            (B, T) booleans. None where `module` takes no tokens, or passes on arguments it has no name for,
            or has encoder and decoder: the modules inside it are the ones to ask.

        Raises:
            ValueError: an argument does not fit the tokens, or what a setting needs is not there.
        """
        self.positions = None
        arguments, nameless = arguments_by_name(module, args, kwargs)
        if nameless and len(roots(module)) > 1:
            return None
        if stacks(module):
            self._keep_for_stacks(module, arguments)
            return None
        is_stack, self._has_stacks = self._has_stacks, False
        decodes = is_stack and arguments.get("encoder_hidden_states") is not None
        side, encodes = DECODER if decodes else "", is_stack and not decodes
        beside, self._beside = self._beside, {}  # however this ends, it is for this forward alone
        told = beside | {key: value for key, value in arguments.items() if value is not None}
        if encodes:
            told.pop("labels", None)
        keep = self._select(module, arguments, told, side, is_stack)
        if encodes:
            self._beside = {key: beside[key] for key in self._keys(DECODER) & beside.keys()}
            self._has_stacks = True
        return keep

    def _keys(self, side: str) -> set[str]:
        """What a batch may say of each token, by name; `side` begins those of a decoder."""
        return {side + self.roles_argument, side + self.mask_argument, "labels"}

    def _keep_for_stacks(self, module: nn.Module, arguments: Mapping[str, Any]) -> None:
        """Keep what a forward says of the tokens of its encoder and decoder, until these are called."""
        own = parameters(module)  # of these, what an earlier forward left is not that of this one
        keys = self._keys("") | self._keys(DECODER)
        told = {key: arguments[key] for key in keys if arguments.get(key) is not None}
        self._beside = {key: value for key, value in self._beside.items() if key not in own} | told
        self._has_stacks = True

    def _select(
        self,
        module: nn.Module,
        arguments: Mapping[str, Any],
        beside: Mapping[str, Any],
        side: str,
        is_stack: bool,
    ) -> Tensor | None:
        """Which tokens count; None where there are none.

        Raises:
            ValueError: an argument does not fit the tokens, or there are none and some must be told apart.
        """
        padding = "attention_mask" if is_stack and self.padding == "decoder_attention_mask" else self.padding
        needed = side + self.mask_argument in beside
        needed |= self._needs_tokens and (bool(side) or not is_stack)  # an encoder may read sound or pictures
        tokens = find_tokens(arguments, padding, self._keys(side), needed)
        if tokens is None:
            if needed:
                raise ValueError(
                    f"`mask` selects tokens, but {type(module).__name__} was called with neither ids (B, T) "
                    "nor embeddings (B, T, D); pass `input_ids`, or a `TokenSelection` without settings and "
                    f"no `{side + self.mask_argument}`."
                )
            return None
        real, before = tokens.real(arguments, padding)
        self.positions = places_of(real, before, arguments.get("position_ids"))
        keep, counts = torch.ones_like(real), []
        for counting in self._tests(tokens, real, self.positions, beside, side):
            left = keep if counting is None else keep & counting
            counts.append((keep ^ left).sum())
            keep = left
        counts = torch.stack([*counts, keep.sum()])
        self._totals[tokens.device] = counts + self._totals.get(tokens.device, 0)
        return keep

    @property
    def _needs_tokens(self) -> bool:
        """Whether padding is not all that is left out."""
        return bool(self.labels or self.special_ids or self.drop_first or self.roles or self.predicate)

    def _tests(
        self, tokens: ForwardTokens, real: Tensor, places: Tensor, beside: Mapping[str, Any], side: str
    ) -> Iterator[Tensor | None]:
        """What counts as far as each of `REASONS` goes.

        Yields:
            (B, T) booleans; None where every token does.
        """
        yield real
        labels = tokens.told(beside, "labels") if self.labels else None
        self.saw_labels |= labels is not None
        yield None if labels is None else labels != self.label_mask_value
        yield ~is_any(tokens.ids_for("special_ids"), self.special_ids) if self.special_ids else None
        yield places >= self.drop_first if self.drop_first else None
        yield self._has_role(tokens, beside, side + self.roles_argument)
        mask = tokens.told(beside, side + self.mask_argument)
        yield None if mask is None else as_booleans(mask, side + self.mask_argument)
        yield None if self.predicate is None else _ask(self.predicate, tokens.ids_for("predicate"), places)

    def _has_role(self, tokens: ForwardTokens, beside: Mapping[str, Any], key: str) -> Tensor | None:
        """Whether the role of each token is one that counts; None where all do.

        Raises:
            ValueError: the batch does not tell.
        """
        if self.roles is None:
            return None
        roles = tokens.told(beside, key)
        if roles is None:
            raise ValueError(
                f"`roles` needs the role of each token, but nothing came as {key!r}; have it in each batch "
                "and call the model on `selection.split(batch, model)`."
            )
        return is_any(roles, self.roles)


def special_ids_of(tokenizer: Any) -> frozenset[int]:
    """Ids that stand for no text: begin, end, padding, and the markers of a chat.

    Args:
        tokenizer: a transformers tokenizer.

    Raises:
        TypeError: it is none.
    """
    try:
        added = tokenizer.added_tokens_decoder
        return frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
    except AttributeError as error:
        raise TypeError(
            f"`tokenizer` must be a transformers tokenizer, got {type(tokenizer).__name__}; give the ids."
        ) from error


def _whole_numbers(values: Iterable[int], name: str) -> tuple[int, ...]:
    """`values` in order, each once.

    Raises:
        ValueError: they are not integers ≥ 0.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"`{name}` must be a collection of integers, got {values!r}.")
    kept = list(values)
    for value in kept:
        check_whole(value, name, least=0)
    return tuple(sorted({int(value) for value in kept}))


def _ask(predicate: Predicate, ids: Tensor, places: Tensor) -> Tensor:
    """What the caller's predicate says.

    Raises:
        ValueError: not booleans (B, T).
    """
    counting = predicate(ids, places)
    if not isinstance(counting, Tensor) or counting.dtype != torch.bool or counting.shape != ids.shape:
        got = type(counting).__name__
        if isinstance(counting, Tensor):
            got = f"{counting.dtype} of shape {tuple(counting.shape)}"
        raise ValueError(f"`predicate` must return booleans of shape {tuple(ids.shape)}, got {got}.")
    return counting.to(ids.device)
