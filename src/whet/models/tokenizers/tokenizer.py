"""Tokenizers and chat templates of GGUF files, with or without transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet import _core
from whet.errors import MissingExtraError, WhetValueError, check_installed, check_unicode
from whet.files import replace_text
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
"""transformers' names of special tokens -> GGUF's."""


def open_tokenizer(file: str | os.PathLike[str] | GGUFFile | Mapping[str, Any]) -> Any:
    """Open the tokenizer of a GGUF file as a transformers tokenizer; see ``read_tokenizer``.

    Returns:
        ``transformers.PreTrainedTokenizerFast`` with the file's special tokens, chat template, and settings of BOS and
        EOS. It decodes without changes (``clean_up_tokenization_spaces`` is off).

    Raises:
        WhetValueError: as ``read_tokenizer``, or the chat template cannot be compiled.
        MissingExtraError: transformers, tokenizers or jinja2 is not installed.
    """
    return read_tokenizer(file).to_transformers()


def read_tokenizer(file: str | os.PathLike[str] | GGUFFile | Mapping[str, Any]) -> GGUFTokenizer:
    """Read the tokenizer of a GGUF file, without transformers.

    Args:
        file: a path, for a split model any of its files; a ``GGUFFile``; or a file's metadata by key.

    Raises:
        WhetValueError: the tokenizer is missing or of an unsupported kind, or a key is invalid; the message names it.
        MissingExtraError: tokenizers is not installed.
    """
    if isinstance(file, Mapping):
        return GGUFTokenizer(file, "read_tokenizer")
    if not isinstance(file, GGUFFile):
        file = read_gguf(Path(file), f'read_tokenizer("{os.fspath(file)}")')
    where = f'read_tokenizer("{file.paths[0]}")'
    return GGUFTokenizer(load_texts(file.metadata, where), where)


def load_tokenizer(model: str | os.PathLike[str] | GGUFFile, where: str = "load_tokenizer") -> Any:
    """Load the tokenizer of a Hugging Face folder (transformers') or of a GGUF file (``read_tokenizer``).

    Args:
        model: the folder, or a file, see ``read_tokenizer``.
        where: prefix of error messages.

    Raises:
        WhetValueError: there is no such folder or file, or its tokenizer cannot be read.
        MissingExtraError: transformers, for a folder, or tokenizers, for a file, is not installed.
    """
    if isinstance(model, GGUFFile) or Path(model).is_file():
        try:
            return read_tokenizer(model)
        except WhetValueError as error:
            raise WhetValueError(f"{where}: {error}") from error
    if not Path(model).is_dir():
        raise WhetValueError(f"{where}: folder or file {os.fspath(model)!r} does not exist.")
    check_installed(where, "transformers")
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise WhetValueError(
            f"{where}: transformers cannot read a tokenizer in {os.fspath(model)} ({error})."
        ) from error


def load_texts(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a file's metadata with the texts of tokens and merges as lists.

    Raises:
        WhetValueError: a text is not UTF-8.
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
    """A tokenizer with the methods of transformers' tokenizers that Whet uses.

    ``bos_token_id``, ``eos_token_id``, ``pad_token_id`` and ``unk_token_id`` are None if the file has none.

    Args:
        metadata: the file's metadata by key.
        where: prefix of error messages.

    Attributes:
        vocabulary: the file's vocabulary.
        backend: the ``tokenizers.Tokenizer``. See ``algorithms`` for differences from llama.cpp.
        stop_token_ids: all tokens that end a generation, ascending: EOS, end of turn, and others.
        chat_template: the Jinja source; name -> source of several; None: the file has none.
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
        """transformers' name -> text of special tokens, such as "eos_token"."""
        self.bos_token_id, self.eos_token_id = special.get("bos"), special.get("eos")
        self.pad_token_id, self.unk_token_id = special.get("padding"), special.get("unknown")

    def __len__(self) -> int:
        return len(self.vocabulary.tokens)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return ``{"input_ids": encode(text)}``."""
        return {"input_ids": self.encode(text, add_special_tokens)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text; special tokens in the text are recognised.

        Args:
            add_special_tokens: add BOS and EOS by the file's settings.

        Raises:
            WhetValueError: the text has lone surrogates.
        """
        check_unicode("encode", text)
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """Decode ids; invalid UTF-8 becomes U+FFFD, with SentencePiece the whole run of byte tokens.

        Args:
            skip_special_tokens: skip control tokens such as BOS and EOS.
            clean_up_tokenization_spaces: must be False: the text is not changed.

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
        """Render messages to text, or to the ids of the text.

        Args:
            conversation: dicts with ``role`` and ``content``.
            tools: JSON schemas of functions. The template named "tool_use" is used if the file has one.
            add_generation_prompt: append the beginning of the assistant's message.
            continue_final_message: leave the last message open.
            tokenize: return ids, as ``{"input_ids": ids}`` with ``return_dict``; else the text.
            return_assistant_tokens_mask: add ``assistant_masks``, 1 for tokens within ``{% generation %}`` of the
                template, else 0.
            options: further variables of the template.

        Raises:
            WhetValueError: the template is missing or rejects the messages, see ``ChatTemplate.render``; the text has
                lone surrogates; ``add_generation_prompt`` with ``continue_final_message``; or the mask without a dict
                of ids or with ``continue_final_message``.
            MissingExtraError: jinja2 is not installed.
        """
        if add_generation_prompt and continue_final_message:
            raise WhetValueError(
                "apply_chat_template: add_generation_prompt and continue_final_message are both True. Pass one of them."
            )
        if return_assistant_tokens_mask and (continue_final_message or not (tokenize and return_dict)):
            raise WhetValueError(
                "apply_chat_template: return_assistant_tokens_mask is True, which needs tokenize=True, "
                "return_dict=True and no continue_final_message. Change these, or omit the mask."
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

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the files that transformers' ``save_pretrained`` writes, without transformers.

        Raises:
            WhetValueError: a chat template is not Jinja, or exceeds its bounds.
        """
        folder, templates = Path(folder), dict(_by_name(self.chat_template))
        self._check_templates()
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            **self.special_tokens_map,
            "backend": "tokenizers",
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(1e30),  # transformers' value for an unknown length
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        replace_text(folder / "tokenizer.json", self.backend.to_str(pretty=True))
        replace_text(folder / "tokenizer_config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
        if default := templates.pop("default", None):
            replace_text(folder / "chat_template.jinja", default)
        for name, template in templates.items():
            (folder / "additional_chat_templates").mkdir(exist_ok=True)
            replace_text(folder / "additional_chat_templates" / f"{name}.jinja", template)

    def _check_templates(self) -> None:
        """Render each template for a short message: transformers does not bound its work."""
        for name in _by_name(self.chat_template):
            self._template(name).check_bounds(self.special_tokens_map)

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
        """Convert to a ``transformers.PreTrainedTokenizerFast``; see ``open_tokenizer``.

        Raises:
            WhetValueError: a chat template is not Jinja, or exceeds its bounds.
            MissingExtraError: transformers is not installed.
        """
        self._check_templates()
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
            f"model again, or pass the tokenizer's folder."
        ) from error


def read_chat_template(metadata: Mapping[str, Any], where: str) -> str | dict[str, str] | None:
    """Return the chat template, name -> template if there are several, or None."""
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
