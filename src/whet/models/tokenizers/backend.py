"""A tokenizer of the tokenizers library with the methods of transformers' tokenizers that Whet uses."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.errors import MissingExtraError, WhetValueError, check_unicode
from whet.files import replace_text

if TYPE_CHECKING:
    from whet.models.tokenizers.template import ChatTemplate


class BackendTokenizer:
    """A tokenizer with the methods of transformers' tokenizers that Whet uses.

    ``bos_token_id``, ``eos_token_id``, ``pad_token_id`` and ``unk_token_id`` are None if the tokenizer has none.

    Args:
        backend: the ``tokenizers.Tokenizer``.
        special_tokens: transformers' name -> text of special tokens, such as "eos_token".
        chat_template: the Jinja source; name -> source of several; None: there is none.
        response_template: transformers' description of replies; None: there is none.

    Attributes:
        backend: see Args.
        special_tokens_map: see ``special_tokens``.
        chat_template: see Args; may be replaced.
        response_template: see Args; a replaced chat_template needs another one.
    """

    template_key = "chat_template"
    """Name of the template's setting, for errors."""

    def __init__(
        self,
        backend: Any,
        special_tokens: Mapping[str, str],
        chat_template: str | dict[str, str] | None,
        response_template: Any = None,
    ) -> None:
        self.backend, self.special_tokens_map = backend, dict(special_tokens)
        self.chat_template, self.response_template = chat_template, response_template
        self._compiled: dict[str, ChatTemplate] = {}
        ids = {name: backend.token_to_id(text) for name, text in special_tokens.items()}
        self.bos_token_id, self.eos_token_id = ids.get("bos_token"), ids.get("eos_token")
        self.pad_token_id, self.unk_token_id = ids.get("pad_token"), ids.get("unk_token")

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return ``{"input_ids": encode(text)}``."""
        return {"input_ids": self.encode(text, add_special_tokens)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text; special tokens in the text are recognised.

        Args:
            add_special_tokens: add BOS and EOS by the tokenizer's settings.

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
            tools: JSON schemas of functions. The template named "tool_use" is used if there is one.
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
        if self.response_template is not None:
            config["response_template"] = self.response_template
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
                "apply_chat_template: the tokenizer has no chat_template. Set it, or give prompts as plain text."
            )
        if sources[name] not in self._compiled:
            try:
                from whet.models.tokenizers.template import ChatTemplate
            except ImportError as error:
                raise MissingExtraError("a chat template", "jinja2", "train") from error
            key = self.template_key if name == "default" else f"{self.template_key}.{name}"
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
        if self.response_template is not None:
            tokenizer.response_template = self.response_template
        return tokenizer


def _by_name(template: str | dict[str, str] | None) -> dict[str, str]:
    return {"default": template} if isinstance(template, str) else template or {}
