"""The tokenizer and the chat template of a GGUF file, with transformers and without."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet import _core
from whet.errors import MissingExtraError, WhetValueError, check_installed, check_unicode
from whet.models.sources.gguf_container import GGUFFile, read_gguf
from whet.models.tokenizers import algorithms
from whet.models.tokenizers.vocabulary import Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from whet.models.tokenizers.template import ChatTemplate

_TEMPLATE = "tokenizer.chat_template"
_ROLES = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "pad": "padding",
    "sep": "seperator",
    "mask": "mask",
    "cls": "cls",
}
"""transformers' names of special tokens, and GGUF's."""


def open_tokenizer(file: str | os.PathLike[str] | GGUFFile | Mapping[str, Any]) -> Any:
    """The tokenizer of a GGUF file as transformers has it; see ``read_tokenizer``.

    Returns:
        ``transformers.PreTrainedTokenizerFast`` with the special tokens, the chat template, and BOS and EOS as the file
        says. It decodes to the text as it is (``clean_up_tokenization_spaces`` is off).

    Raises:
        WhetValueError: as ``read_tokenizer``; or the chat template cannot be compiled.
        MissingExtraError: transformers, tokenizers or jinja2 is not installed.
    """
    return read_tokenizer(file).to_transformers()


def read_tokenizer(file: str | os.PathLike[str] | GGUFFile | Mapping[str, Any]) -> GGUFTokenizer:
    """The tokenizer of a GGUF file, without transformers.

    Args:
        file: of a model in parts any of them; or what ``read_gguf`` gave; or a file's metadata by key.

    Raises:
        WhetValueError: there is no tokenizer, it is of a kind that is not read, or a key is wrong; it is named.
        MissingExtraError: tokenizers is not installed.
    """
    if isinstance(file, Mapping):
        return GGUFTokenizer(file, "read_tokenizer")
    if not isinstance(file, GGUFFile):
        file = read_gguf(Path(file), f'read_tokenizer("{os.fspath(file)}")')
    where = f'read_tokenizer("{file.paths[0]}")'
    return GGUFTokenizer(with_texts(file.metadata, where), where)


def load_tokenizer(model: str | os.PathLike[str] | GGUFFile, where: str = "load_tokenizer") -> Any:
    """The tokenizer of a model of either form: that of a Hugging Face folder, or ``read_tokenizer`` of a GGUF file.

    Args:
        model: the folder, or a file as ``read_tokenizer`` takes it.
        where: the caller's name, for errors.

    Raises:
        WhetValueError: there is no such folder or file, or no tokenizer in it that can be read.
        MissingExtraError: of a folder, and transformers is not installed; of a file, tokenizers.
    """
    if isinstance(model, GGUFFile) or Path(model).is_file():
        try:
            return read_tokenizer(model)
        except WhetValueError as error:
            raise WhetValueError(f"{where}: {error}") from error
    if not Path(model).is_dir():
        raise WhetValueError(f"{where}: there is no folder or file {os.fspath(model)!r}.")
    check_installed(where, "transformers")
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise WhetValueError(
            f"{where}: {os.fspath(model)} holds no tokenizer that transformers reads ({error})."
        ) from error


def with_texts(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A file's metadata, with the texts that a tokenizer needs as lists.

    Raises:
        WhetValueError: one is not UTF-8.
    """
    found = dict(metadata)
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if isinstance(found.get(key), _core.GGUFTexts):
            try:
                found[key] = found[key].to_list()
            except ValueError as error:
                raise WhetValueError(f"{where}: {key} {error}") from None
    return found


class GGUFTokenizer:
    """Text to token ids and back, and messages to text: the calls of a transformers tokenizer that Whet makes.

    ``bos_token_id``, ``eos_token_id``, ``pad_token_id`` and ``unk_token_id`` are None where the file has none.

    Args:
        metadata: of the file, by key.
        where: the caller's name, for errors.

    Attributes:
        vocabulary: what the file says.
        backend: the ``tokenizers.Tokenizer``. See ``algorithms`` for where it differs from llama.cpp.
        stop_token_ids: all tokens that end a generation, ascending: EOS, the end of a turn, and such.
        chat_template: the Jinja source; of several a dict by name; None: the file has none.
    """

    def __init__(self, metadata: Mapping[str, Any], where: str = "GGUFTokenizer") -> None:
        self.vocabulary: Vocabulary = read_vocabulary(metadata, where)
        self.stop_token_ids = self.vocabulary.stop_ids
        self.chat_template = read_chat_template(metadata, where)
        self.backend = _build(self.vocabulary, where)
        self._compiled: dict[str, ChatTemplate] = {}
        special = self.vocabulary.special_ids
        self.special_tokens_map = {
            f"{name}_token": self.vocabulary.tokens[special[role]] for name, role in _ROLES.items() if role in special
        }
        """Texts of special tokens by transformers' names, such as "eos_token"."""
        self.bos_token_id, self.eos_token_id = special.get("bos"), special.get("eos")
        self.pad_token_id, self.unk_token_id = special.get("padding"), special.get("unknown")

    def __len__(self) -> int:
        return len(self.vocabulary.tokens)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """``{"input_ids": encode(text)}``"""
        return {"input_ids": self.encode(text, add_special_tokens)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; special tokens in it are those tokens.

        Args:
            add_special_tokens: with BOS and EOS, as the file says.

        Raises:
            WhetValueError: the text has lone surrogates.
        """
        check_unicode("encode", text)
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of ids; bytes that are no UTF-8 come as U+FFFD, of SentencePiece all of a run of tokens of bytes.

        Args:
            skip_special_tokens: leave out control tokens, BOS, EOS and such.
            clean_up_tokenization_spaces: must be False: the text comes as it is.

        Raises:
            WhetValueError: ``clean_up_tokenization_spaces``.
        """
        if clean_up_tokenization_spaces:
            raise WhetValueError(
                "decode: clean_up_tokenization_spaces is True, expected False: it would alter the text."
            )
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        **options: Any,
    ) -> Any:
        """Messages as a text, or the ids of that text.

        Args:
            conversation: dicts with ``role`` and ``content``.
            tools: JSON schemas of functions. They get the template called "tool_use" where the file has one.
            add_generation_prompt: end where the assistant begins.
            continue_final_message: end with the last message, open.
            tokenize: return ids, as ``{"input_ids": ids}`` with ``return_dict``; else the text.
            return_assistant_tokens_mask: add ``assistant_masks`` to that, 1 for the tokens that the template marks as
                the assistant's by ``{% generation %}``, and 0 for others.
            options: further variables of the template.

        Raises:
            WhetValueError: there is no template, or it refuses the messages, see ``ChatTemplate.render``; the text has
                lone surrogates; or both of ``add_generation_prompt`` and ``continue_final_message``; or the mask
                without a dict of ids, or with ``continue_final_message``.
            MissingExtraError: jinja2 is not installed.
        """
        if add_generation_prompt and continue_final_message:
            raise WhetValueError(
                "apply_chat_template: add_generation_prompt and continue_final_message are both True. Pass one of them."
            )
        if return_assistant_tokens_mask and (continue_final_message or not (tokenize and return_dict)):
            raise WhetValueError(
                "apply_chat_template: return_assistant_tokens_mask is True, which goes with tokenize=True and "
                "return_dict=True, and not with continue_final_message. Change these, or leave the mask out."
            )
        values = {**self.special_tokens_map, **options, "add_generation_prompt": add_generation_prompt}
        values |= {"tools": tools, "documents": options.get("documents")}
        template = self._template("tool_use" if tools else "default")
        text = template.render(conversation, continue_final_message=continue_final_message, **values)
        if not tokenize:
            return text
        check_unicode("apply_chat_template", text)
        encoded = self.backend.encode(text, add_special_tokens=False)
        found: dict[str, list[int]] = {"input_ids": encoded.ids}
        if return_assistant_tokens_mask:
            mask = found["assistant_masks"] = [0] * len(encoded.ids)
            for begin, end in template.generation_spans(text, conversation, **values):
                inside = [i for i, (first, last) in enumerate(encoded.offsets) if first < end and last > begin]
                for i in range(inside[0], inside[-1] + 1) if inside else ():
                    mask[i] = 1
        return found if return_dict else encoded.ids

    def _template(self, name: str) -> ChatTemplate:
        sources = _by_name(self.chat_template)
        name = name if name in sources else "default"
        if name not in sources:
            raise WhetValueError(
                f"apply_chat_template: the file has no {_TEMPLATE}. Set chat_template, or give prompts as plain text."
            )
        if sources[name] not in self._compiled:
            try:
                from whet.models.tokenizers.template import ChatTemplate
            except ImportError as error:
                raise MissingExtraError("a chat template", "jinja2", "train") from error
            key = _TEMPLATE if name == "default" else f"{_TEMPLATE}.{name}"
            self._compiled[sources[name]] = ChatTemplate(sources[name], key)
        return self._compiled[sources[name]]

    def to_transformers(self) -> Any:
        """The same tokenizer as a ``transformers.PreTrainedTokenizerFast``; see ``open_tokenizer``.

        transformers does not bound what a template computes, so each is first rendered here for a short message.

        Raises:
            WhetValueError: a chat template is no Jinja, or exceeds its bounds.
            MissingExtraError: transformers is not installed.
        """
        for name in _by_name(self.chat_template):
            self._template(name).check_bounds(self.special_tokens_map)
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError as error:
            raise MissingExtraError("open_tokenizer", "transformers", "train") from error
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=self.backend, clean_up_tokenization_spaces=False, **self.special_tokens_map
        )
        tokenizer.chat_template = self.chat_template
        return tokenizer


def _build(vocabulary: Vocabulary, where: str) -> Any:
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("the tokenizer of a GGUF file", "tokenizers", "train") from error
    try:
        return algorithms.build(vocabulary)
    except Exception as error:  # the library raises nothing more precise
        vocabulary.check_merges(where)
        raise WhetValueError(
            f"{where}: the {vocabulary.model} tokenizer of tokenizer.ggml.* cannot be built: {error}. Convert the "
            f"model again, or pass the tokenizer's own folder."
        ) from error


def read_chat_template(metadata: Mapping[str, Any], where: str) -> str | dict[str, str] | None:
    """The template, or the templates by name where there are several."""
    begin = f"{_TEMPLATE}."
    found = {key.removeprefix(begin): value for key, value in metadata.items() if key.startswith(begin)}
    if _TEMPLATE in metadata:
        found["default"] = metadata[_TEMPLATE]
    for name, source in found.items():
        if not isinstance(source, str):
            raise WhetValueError(f"{where}: {_TEMPLATE} ({name}) is {source!r:.60}, expected a text. Remove the key.")
    return found.get("default") if found.keys() <= {"default"} else found


def _by_name(template: str | dict[str, str] | None) -> dict[str, str]:
    return {"default": template} if isinstance(template, str) else template or {}
