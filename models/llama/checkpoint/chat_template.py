"""Chat templates: Jinja source that comes with the weights, compiled in a sandbox and rendered to a prompt."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tree_attn.extras import how_to_install
from tree_attn.models.llama.checkpoint.reading import blaming


class _Refusal(ValueError):
    """The template's own refusal of the messages."""


def check_template(source: str, file_name: str) -> None:
    """Raises CheckpointError, which names the file, for a template that does not compile; without jinja2, nothing."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        return
    _compiled(source, file_name)


def render(
    source: str, file_name: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, str]
) -> str:
    """Renders a conversation, ready for the assistant's answer.

    Raises:
      ValueError: the template refuses the messages.
      CheckpointError: the template is wrong.
      ImportError: the jinja2 package is not installed.
    """
    template = _compiled(source, file_name)
    with blaming(file_name, "the chat template fails: "):
        try:
            # Templates ask whether `tools` is none; undefined it would be neither.
            return template.render(
                messages=list(messages), add_generation_prompt=True, tools=None, documents=None, **special_tokens
            )
        except _Refusal as refusal:
            reason = str(refusal)
    raise ValueError(f"the chat template refuses these messages: {reason}")


def _compiled(source: str, file_name: str) -> Any:
    environment = _environment()
    with blaming(file_name, "the chat template does not compile: "):
        return environment.from_string(source)


@functools.cache
def _environment():
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise ImportError(f"a chat template needs jinja2: {how_to_install('demo')}") from None

    class Generation(jinja2.ext.Extension):
        """The block `{% generation %}`, which marks the assistant's text for training."""

        tags = frozenset({"generation"})

        def parse(self, parser):
            number = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(number)

    def raise_exception(message: str):
        raise _Refusal(message)

    # Sandboxed, for the template comes with the weights; templates are written for these settings.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment
