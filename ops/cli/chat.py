"""A question put into a model's own chat template, as token ids."""

from typing import TYPE_CHECKING

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.common.base.errors import (
    ConfigError,
    ModelLoadError,
)

if TYPE_CHECKING:
    from kvferry.common.tokenizer import Tokenizer


def chat_prompt(tokenizer: "Tokenizer", question: str) -> list[int]:
    """Ids of a conversation with one user message, ready for the model's turn.

    Raises ConfigError without a template, ModelLoadError where it does not work.
    """
    if not tokenizer.chat_template:
        raise ConfigError("--chat: the model has no chat template")
    # A template comes with a model from anywhere, so it gets no more than the messages.
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
