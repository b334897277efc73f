"""Conversations to token ids by the model's own Jinja template, such that no client text can become a control token.

How that is made sure: control tokens are never looked for in rendered text. Instead, when the template is loaded, the spellings of added
tokens in the template's *own* text are replaced by marks, one character each, and the bos and eos variables that it gets are marks too.
After rendering, marks become control tokens and everything between them is encoded by a tokenizer that has no added tokens. Marks are
lone surrogates, which valid text cannot hold and which are refused in everything a client sends. So a control token in the prompt was
written by the template, however client strings are cut, joined, escaped or nested. Client text itself is not touched: comparisons,
lengths and `tojson` in templates see what the client sent.
"""

import json
import re
from datetime import datetime
from pathlib import Path

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deepserve.text.tokenizer import Tokenizer, check_text, read_config

_FIRST_MARK, _END_MARK = 0xD800, "\udfff"
_MARK = re.compile("([\ud800-\udfff])")
# Templates split past assistant turns at these to drop the reasoning, so they stay markup there (and only there).
_REASONING_TAGS = ("<think>", "</think>")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names that clients use, the one that templates read first
_PROBE_TURNS = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user")]
_PROBE_ARGUMENTS = '{"k": 1}'


class ChatTemplate:
    """The chat template of one model; immutable and safe to share between threads."""

    def __init__(self, source: str | dict[str, str] | None, tokenizer: Tokenizer):
        """`source`: Jinja text, or texts by name ("default", "tool_use"), or None for a model without one (`encode` then refuses).

        Raises ValueError for a template that does not compile, or that joins control tokens from parts.
        """
        spellings = sorted(tokenizer.added_tokens, key=len, reverse=True)  # the longest first, as tokenizers match them
        if _FIRST_MARK + len(spellings) > ord(_END_MARK):
            raise ValueError(f"the tokenizer has {len(spellings)} added tokens, chat templates are supported up to 2047")
        self._tokenizer = tokenizer
        self._mark_of = {text: chr(_FIRST_MARK + i) for i, text in enumerate(spellings)}
        self._text_of = {mark: text for text, mark in self._mark_of.items()}
        self._spelling = re.compile("|".join(map(re.escape, spellings)) or "(?!)")
        self._constants = {name: self._mark(text) for name, text in tokenizer.named_tokens.items()}
        env = _environment()
        self._reserved = {"messages", "tools", "documents", "add_generation_prompt", *self._constants, *env.globals}
        sources = {"default": source} if isinstance(source, str) else source or {}
        if sources and "default" not in sources:
            raise ValueError(f"the model's chat templates are named {', '.join(sources)}: none of them is 'default'")
        self._templates = {name: self._compile(env, text) for name, text in sources.items()}
        self._objects, self._absent = self._call_form() if self._templates else (False, None)
        if self._templates:
            self._check_control_tokens()

    @classmethod
    def from_folder(cls, folder: str | Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """The template of a Hugging Face model folder: chat_template.jinja, else `chat_template` of tokenizer_config.json."""
        folder = Path(folder)
        if (folder / "chat_template.jinja").is_file():
            return cls((folder / "chat_template.jinja").read_text("utf-8"), tokenizer)
        source = read_config(folder).get("chat_template")
        try:
            if isinstance(source, list):
                source = {entry["name"]: entry["template"] for entry in source}
            return cls(source, tokenizer)
        except (KeyError, TypeError, AttributeError) as error:  # neither text nor named texts
            raise ValueError(f"{folder / 'tokenizer_config.json'} has a chat_template that cannot be read: {error!r}") from error

    def encode(
        self,
        messages: list[dict],
        *,
        tools: list[dict] | None = None,
        documents: list[dict] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict | None = None,
    ) -> list[int]:
        """Prompt token ids of a conversation in OpenAI's form, made of JSON values only.

        `continue_final_message` leaves the last message open (then `add_generation_prompt` must be off). `chat_template_kwargs` are
        further variables of the template ("thinking"). Text parts of a message are joined by a newline. Raises ValueError, with the
        template's own message where it has one, for whatever the template or the model cannot take.
        """
        return self.encode_marked(
            self._render(messages, tools, documents, add_generation_prompt, continue_final_message, chat_template_kwargs)
        )

    def marked(self, messages: list[dict], **options) -> str:
        """The first and quick half of `encode`, whose options these are: the prompt with marks for control tokens."""
        options = {"tools": None, "documents": None, "add_generation_prompt": True, "continue_final_message": False, **options}
        kwargs = options.pop("chat_template_kwargs", None)
        return self._render(messages, kwargs=kwargs, **options)

    def encode_marked(self, marked: str) -> list[int]:
        """The second half, which takes as long as the text is."""
        ids = []
        for run in _MARK.split(marked):
            if run in self._text_of:
                ids.append(self._tokenizer.added_tokens[self._text_of[run]])
            elif run:
                ids += self._tokenizer.encode(run, add_special_tokens=False, parse_special=False)
        return ids

    def render(self, messages: list[dict], **options) -> str:
        """The prompt as text, to look at (options as of `encode`): client text and control tokens cannot be told apart in it."""
        return self._unmark(self.marked(messages, **options))

    def _render(self, messages, tools, documents, add_generation_prompt, continue_final_message, kwargs) -> str:
        """Prompt text with marks for control tokens."""
        if not self._templates:
            raise ValueError("the model has no chat template: send a prompt instead of messages")
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages must be a list of at least one message")
        for name, values in (("messages", messages), ("tools", tools or []), ("documents", documents or [])):
            if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
                raise ValueError(f"{name} must be a list of objects")
            _check_data(values, name)
        kwargs = kwargs or {}
        if not isinstance(kwargs, dict):
            raise ValueError(f"chat_template_kwargs must be an object, got {kwargs!r}")
        _check_data(kwargs, "chat_template_kwargs")
        if reserved := sorted(self._reserved & kwargs.keys()):
            raise ValueError(f"chat_template_kwargs cannot set {reserved[0]!r}")
        turns = [self._turn(message) for message in messages]
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError("continue_final_message and add_generation_prompt exclude each other")
            if "tool_calls" in turns[-1]:
                raise ValueError("continue_final_message cannot go on behind tool calls")
            turns[-1]["content"] += _END_MARK + " "
        variables = {"messages": turns, "tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
        rendered = self._run(variables | kwargs)
        return _cut(rendered, turns[-1]["content"]) if continue_final_message else rendered

    def _run(self, variables: dict) -> str:
        template = self._templates["tool_use" if variables["tools"] and "tool_use" in self._templates else "default"]
        try:
            return template.render(self._constants | variables)
        except jinja2.TemplateError as err:
            raise ValueError(f"the chat template refuses the conversation: {self._unmark(str(err))}") from err
        except Exception as err:  # whatever a client's values provoke inside a template is the client's error, not the server's
            raise ValueError(f"the chat template cannot render the conversation: {self._unmark(str(err))}") from err

    def _turn(self, message: dict) -> dict:
        """One message as templates expect it: content is text, absent values are absent. Raises ValueError."""
        role = message.get("role")
        if not isinstance(role, str):
            raise ValueError(f"the role of a message must be text, got {role!r}")
        turn = {key: value for key, value in message.items() if value is not None}
        if "content" in turn or role != "assistant" or "tool_calls" not in turn:
            turn["content"] = _content_text(role, turn.get("content"))
        else:
            turn["content"] = self._absent
        reasoning = next((turn[name] for name in _REASONING_FIELDS if name in turn), None)
        if reasoning is not None:
            turn = {"thinking": reasoning, **turn, "reasoning_content": reasoning}
        if role == "assistant" and turn["content"]:
            for tag in _REASONING_TAGS:
                turn["content"] = turn["content"].replace(tag, self._mark_of.get(tag, tag))
        if self._objects and isinstance(turn.get("tool_calls"), list):
            turn["tool_calls"] = [_with_object(call) for call in turn["tool_calls"]]
        return turn

    def _compile(self, env: jinja2.Environment, source: str) -> jinja2.Template:
        try:
            tree = env.parse(source)
            for node in tree.find_all((nodes.Const, nodes.TemplateData)):  # string literals; text outside of {{ }}
                field = "data" if isinstance(node, nodes.TemplateData) else "value"
                if isinstance(getattr(node, field), str):
                    setattr(node, field, self._mark(getattr(node, field)))
            return env.from_string(tree)
        except jinja2.TemplateSyntaxError as err:
            raise ValueError(f"the chat template does not compile: {err.message} (line {err.lineno})") from err

    def _mark(self, text: str) -> str:
        return self._spelling.sub(lambda match: self._mark_of[match[0]], text)

    def _unmark(self, text: str) -> str:
        return _MARK.sub(lambda match: self._text_of.get(match[0], ""), text)

    def _call_form(self) -> tuple[bool, str | None]:
        """How this template takes past tool calls: arguments as objects or as JSON text; which content stands for none.

        Templates differ: R1's joins the arguments to text and tests `content is none`, GLM's walks the arguments and writes "None".
        So a small conversation is tried in each form, the form that clients send first.
        """
        for objects in (False, True):
            function = {"name": "f", "arguments": json.loads(_PROBE_ARGUMENTS) if objects else _PROBE_ARGUMENTS}
            calls = [{"id": "call_0", "type": "function", "function": function}]
            for absent in (None, ""):
                turn = {"role": "assistant", "content": absent, "tool_calls": calls}
                result = {"role": "tool", "content": "t", "tool_call_id": "call_0", "name": "f"}
                rendered = self._probe([_PROBE_TURNS[0], turn, result])
                if rendered and "None" not in rendered and (objects or _PROBE_ARGUMENTS in rendered):
                    return objects, absent
        return True, ""

    def _check_control_tokens(self) -> None:
        """Refuse templates like '<|' + role + '|>', whose control tokens would silently become plain text."""
        if joined := self._spelling.search(self._probe(_PROBE_TURNS)):
            raise ValueError(f"the chat template joins the control token {joined[0]!r} from parts, which is not supported")

    def _probe(self, turns: list[dict]) -> str:
        """What the template makes of turns, with marks; empty if it refuses them."""
        try:
            return self._run({"messages": turns, "tools": None, "documents": None, "add_generation_prompt": True})
        except ValueError:
            return ""


def _environment() -> jinja2.Environment:
    """Jinja as transformers sets it up for chat templates."""

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


def _check_data(value, what: str) -> None:
    """Raise ValueError unless `value` is made of JSON values with valid text: then it holds no marks, and no methods of its own."""
    stack = [value]
    while stack:
        item = stack.pop()
        if type(item) is str:
            check_text(item, f"a string in {what}")
        elif type(item) is dict:
            for key in item:
                check_text(key, f"a key in {what}")
            stack += item.values()
        elif type(item) in (list, tuple):
            stack += item
        elif item is not None and type(item) not in (int, float, bool):
            raise ValueError(f"{what} must be made of JSON values, found a {type(item).__name__}")


def _content_text(role: str, content) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"the content of a message with role {role!r} must be text or a list of text parts, got {content!r}")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"content parts must be of type 'text' with a text, got one of type {kind!r}")
    return "\n".join(part["text"] for part in content)


def _with_object(call):
    """A tool call with its arguments as an object, where they are JSON text of one."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}} if isinstance(arguments, dict) else call


def _cut(rendered: str, content: str) -> str:
    """The prompt up to the end mark, which `content` ends with; spaces before it go if the template trimmed the one behind it."""
    before, mark, after = rendered.rpartition(_END_MARK)
    if not mark or content[:-2].strip() not in before:
        raise ValueError("continue_final_message needs the final message whole, but the chat template leaves out a part of it")
    before = before.replace(_END_MARK, "")  # a template may write the message more than once
    return before if after.startswith(" ") else before.rstrip()
