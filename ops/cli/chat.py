"""Renders a question with a model's chat template, as token ids."""

from typing import TYPE_CHECKING

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.common.base.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from kvferry.common.tokenizer import Tokenizer


def chat_prompt(tokenizer: "Tokenizer", question: str) -> list[int]:
    """Token ids of a conversation with one user message and the generation prompt.

    Raises ConfigError if the model has no template, ModelLoadError if the template fails.
    """
    if not tokenizer.chat_template:
        raise ConfigError("--chat: the model has no chat template")
    # A template comes from an untrusted model: it runs in a sandbox and gets only the messages.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        text = environment.from_string(tokenizer.chat_template).render(
            messages=[{"role": "user", "content": question}],
            add_generation_prompt=True,
            bos_token=tokenizer.special.bos or "",
            eos_token=tokenizer.special.eos or "",
        )
    except TemplateError as error:
        raise ModelLoadError(f"the model's chat template: {error}") from None
    return tokenizer.encode(text, add_special_tokens=False)
