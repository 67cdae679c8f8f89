from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from router.errors import ApiError
from router.tokenizer import ChatTokenizer
from tests.router.small_tokenizer import write_model_dir

USER = [{"role": "user", "content": "hi"}]


def with_template(path: Path, template: object) -> ChatTokenizer:
    write_model_dir(path)
    (path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "bos_token": {"content": "<s>"}}), encoding="utf-8"
    )
    return ChatTokenizer(path)


def test_long_and_short_texts_encode_alike(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(write_model_dir(tmp_path))
    short = asyncio.run(tokenizer.encode("aé", add_special_tokens=True))
    long = asyncio.run(tokenizer.encode("aé" * 5_000, add_special_tokens=True))
    assert long == short * 5_000
    assert asyncio.run(tokenizer.decode(long)) == "aé" * 5_000
    assert asyncio.run(tokenizer.token_strs(long[:3])) == ["a", "\ufffd", "\ufffd"]
    tokenizer.close()


def test_only_what_is_quick_runs_on_the_event_loop(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(write_model_dir(tmp_path))
    threads: list[str] = []

    def watch(name: str) -> None:
        work: Callable[..., object] = getattr(tokenizer, name)

        def watched(*args: object) -> object:
            threads.append(threading.current_thread().name)
            return work(*args)

        setattr(tokenizer, name, watched)

    for name in ("_encode", "_decode", "_token_strs"):
        watch(name)

    async def all_three(length: int) -> None:
        token_ids = await tokenizer.encode("a" * length, add_special_tokens=True)
        await tokenizer.decode(token_ids)
        await tokenizer.token_strs(token_ids)

    asyncio.run(all_three(10))
    asyncio.run(all_three(10_000))
    tokenizer.close()
    assert threads == [threading.current_thread().name] * 3 + ["tokenizer_0"] * 3


def test_names_that_templates_use(tmp_path: Path) -> None:
    template = (
        "{%- for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ bos_token }}{{ m | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}"
    )
    text = with_template(tmp_path, template).render_chat([*USER, *USER], add_generation_prompt=False)
    assert text == '<s>{"role": "user", "content": "hi"}4'


def test_the_default_of_several_templates(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    assert with_template(tmp_path, templates).render_chat(USER, add_generation_prompt=True) == "y"


def test_a_template_in_a_file_of_its_own(tmp_path: Path) -> None:
    write_model_dir(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert ChatTokenizer(tmp_path).render_chat(USER, add_generation_prompt=True) == "from the file"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].content + 5 }}",
        "{{ undefined.field }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_templates_that_fail_or_pry_refuse_the_request(tmp_path: Path, template: str) -> None:
    tokenizer = with_template(tmp_path, template)
    with pytest.raises(ApiError) as caught:
        tokenizer.render_chat(USER, add_generation_prompt=True)
    assert caught.value.status == 400


def test_no_template_is_said(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="chat_template"):
        with_template(tmp_path, None).render_chat(USER, add_generation_prompt=True)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        ChatTokenizer(tmp_path)
    with pytest.raises(ValueError, match="does not compile"):
        with_template(tmp_path, "{% if %}")


def test_the_router_starts_without_heavy_imports() -> None:
    code = "import sys, router.http_api; print([m for m in ('ray', 'torch', 'transformers') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
