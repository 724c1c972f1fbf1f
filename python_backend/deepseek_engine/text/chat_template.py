"""Chat templates of a checkpoint: from messages to the text of a prompt."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import SecurityError
from piccard_contract.errors import ErrorCode, RequestError

from deepseek_engine.text.errors import TokenizerError
from deepseek_engine.text.messages import normalize_messages
from deepseek_engine.text.template_sandbox import TemplateRefusalError, TemplateSandbox

RESERVED_VARIABLES = frozenset(("messages", "add_generation_prompt", "bos_token", "eos_token"))


class ChatTemplate:
    """The chat templates of one checkpoint.

    Args:
        sources: Jinja sources by name; "default" is the usual one, "tool_use" is taken for requests with tools.
        special_tokens: variables such as bos_token that templates read.

    Raises:
        TokenizerError: a source is not valid Jinja.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._sandbox = TemplateSandbox()
        self._templates = {name: self._compile(name, source) for name, source in self._sources.items()}

    def __bool__(self) -> bool:
        """Whether the checkpoint brings a template at all."""
        return bool(self._templates)

    def hash(self) -> str:
        """sha256, in hex, of all that decides the text of a prompt: the sources and the special tokens in them."""
        material = json.dumps([self._sources, self._special_tokens], sort_keys=True)
        return hashlib.sha256(material.encode()).hexdigest()

    def render(self, messages: Any, /, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt's text, with bos where the template writes one.

        Args:
            messages: a list of objects with `role` and `content` (a string or a list of text parts).
            add_generation_prompt: end with the opening of the assistant's answer.
            variables: what else the template reads, e.g. `tools` or `enable_thinking`.

        Raises:
            RequestError: UNSUPPORTED without a template or where it breaks its sandbox, INVALID_VALUE where it refuses
                the messages or cannot render them, and what `normalize_messages` raises.
        """
        normal = normalize_messages(messages)
        if reserved := RESERVED_VARIABLES & variables.keys():
            raise RequestError(
                ErrorCode.INVALID_VALUE, f"chat template variable {min(reserved)} is set by the service; leave it out."
            )
        template = self._choose(variables)
        context = {
            **self._special_tokens,
            **variables,
            "messages": normal,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._render(template, context)

    def _compile(self, name: str, source: str) -> Template:
        try:
            return self._sandbox.from_string(source)
        except TemplateSyntaxError as error:
            where = f"the {name} chat template, line {error.lineno}"
            raise TokenizerError(f"{where}: {error.message}; mend or remove the template") from error
        except (TemplateError, SyntaxError, RecursionError, OverflowError, MemoryError) as error:
            raise TokenizerError(f"the {name} chat template does not compile: {error}; mend or remove it") from error

    def _choose(self, variables: Mapping[str, Any]) -> Template:
        names = ("tool_use", "default") if variables.get("tools") else ("default",)
        template = next((self._templates[name] for name in names if name in self._templates), None)
        if template is None:
            raise RequestError(
                ErrorCode.UNSUPPORTED,
                "The version's checkpoint has no chat template; send text_input instead of messages.",
            )
        return template

    def _render(self, template: Template, context: dict[str, Any]) -> str:
        try:
            return self._sandbox.render(template, context)
        except TemplateRefusalError as error:
            raise RequestError(
                ErrorCode.INVALID_VALUE, f"The chat template refuses these messages: {error.message}"
            ) from error
        except (SecurityError, OverflowError, MemoryError, RecursionError) as error:
            raise RequestError(
                ErrorCode.UNSUPPORTED,
                f"The version's chat template does what a template may not: {str(error).rstrip('.')}; "
                "send text_input instead.",
            ) from error
        # A template runs arbitrary expressions over the client's values, so any error may come out of it.
        except Exception as error:
            raise RequestError(
                ErrorCode.INVALID_VALUE,
                f"The chat template cannot render these messages ({type(error).__name__}: {str(error)[:200]}); "
                "check their roles, contents and the template's variables.",
            ) from error
