"""The tool format of a chat template, recognized by the parts that distinguish published templates."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from octavo.loader.checkpoint import open_checkpoint
from octavo.server.reasoning.reasoning_format import find_reasoning_format
from octavo.server.tool_parsers.tool_format import find_tool_format, tool_formats
from octavo.tokenizer import load_tokenizer
from octavo.tokenizer.chat_template import ChatTemplate
from tests.server.test_tool_parsers import fold, parse
from tests.support.tool_outputs import TOOLS

# Short pieces of published templates: where they describe tools, and where they write a call of an earlier turn.
TEMPLATES = {
    "Qwen/Qwen2.5-7B-Instruct": (
        "{%- if tools %} within <tools></tools> XML tags: {{- tool | tojson }}"
        """{{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}""",
        "hermes",
    ),
    "Qwen/Qwen3-8B": (
        "{%- if tools %}{{- tool | tojson }} return a json object within <tool_call></tool_call> XML tags"
        "{%- set content = content.split('</think>')[-1] %}",
        "hermes",
    ),
    "NousResearch/Hermes-3-Llama-3.1-8B": (
        "{%- for tool in tools %}{{- json_to_python_type(param) }}For each function call return a json object with "
        "function name and arguments within <tool_call></tool_call> XML tags<|im_end|>",
        "hermes",
    ),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (
        "{%- if tools %}<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1",
        "qwen3_coder",
    ),
    "stepfun-ai/Step-3.5-Flash": (
        "{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}{{- '<parameter=' + args_name + '>\\n' }}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}",
        "qwen3_coder",
    ),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": (
        "<seed:tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>value_1</parameter>",
        "seed_oss",
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (
        '{%- if builtin_tools is defined %}Environment: ipython {"name": function name, "parameters": dictionary of '
        'argument name and its value}{{- "<|python_tag|>" + tool_call.name + ".call(" }}',
        "llama3_json",
    ),
    "meta-llama/Llama-3.2-1B-Instruct": (
        '{%- if tools is not none %}{"name": function name, "parameters": dictionary of argument name and its value}.'
        "Do not use variables.{%- if tools_in_user_message %}<|start_header_id|>ipython<|end_header_id|>",
        "llama3_json",
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": (
        '{{- "[AVAILABLE_TOOLS] [" }}{%- if tool_call.id|length != 9 %}{{- "[TOOL_CALLS] [" }}',
        "mistral",
    ),
    "mistralai/Devstral-Small-2507": (
        "{{- '[AVAILABLE_TOOLS]' + tools|tojson }}{{- '[TOOL_CALLS]' + tool.name + '[ARGS]' + arguments }}",
        "mistral_args",
    ),
    "mistralai/Mistral-7B-Instruct-v0.1": ("{{ '[INST] ' + message['content'] + ' [/INST]' }}", None),
    "meetkai/functionary-medium-v3.1": (
        "{%- for t in tools %}{{ '<function=' + tool_call['function']['name'] + '>' + "
        "tool_call['function']['arguments'] + '</function>' }}<|start_header_id|>ipython",
        "functionary",
    ),
    "meetkai/functionary-small-v3.2": (
        "// Supported function definitions {{ '>>>all\\n' + message['content'] }}"
        "{{ '>>>' + tool_call['function']['name'] }}",
        "functionary_recipients",
    ),
    "google/gemma-3-1b-it": ("{{ '<start_of_turn>' + role + '\\n' + first_user_prefix }}", "gemma"),
    "google/gemma-4-E4B-it": (
        "{{- '<|tool>' -}}{{- format_function_declaration(tool) -}}{{- '<tool|>' -}}{{- '<|turn>' + role }}"
        "{{- '<|tool_call>call:' + function['name'] + '{' -}}{{- key -}}:{{- '<|\"|>' + argument + '<|\"|>' -}}"
        "{{- '}<tool_call|>' -}}",
        "gemma4",
    ),
    "google/gemma-3 with a template of tools": ("{%- if tools is not none -%}<start_of_turn>[func_name1(", "pythonic"),
    "deepseek-ai/DeepSeek-V3.1": (
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' + "
        "tool['function']['arguments'] + '<｜tool▁call▁end｜>'}}",
        "deepseek_v31",
    ),
    "deepseek-ai/DeepSeek-V3-0324": (
        "{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + "
        "tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```' + "
        "'<｜tool▁call▁end｜>'}}",
        "deepseek_v3",
    ),
    "deepseek-ai/DeepSeek-V3.2 with a template that writes what its encoding writes": (
        "{%- set dsml = '｜DSML｜' -%}{{- '<' + dsml + 'function_calls>' }}{%- for call in message.tool_calls -%}"
        "{{- '<' + dsml + 'invoke name=\"' + call.function.name + '\">' }}"
        "{{- '<' + dsml + 'parameter name=\"' + key + '\" string=\"true\">' + value + '</' + dsml + 'parameter>' }}"
        "{{- '</' + dsml + 'invoke>' }}{%- endfor -%}{{- '</' + dsml + 'function_calls>' }}",
        "deepseek_v32",
    ),
    "ibm-granite/granite-3.3-8b-instruct": (
        "{%- if available_tools %} respond only with <|tool_call|> followed by a JSON list of tools used. "
        "{{- '<|start_of_role|>available_tools<|end_of_role|>' }}",
        "granite",
    ),
    "openai/gpt-oss-20b": (
        "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
        "{{- ' to=functions.' + tool_call.name + '<|channel|>commentary ' }}{{- 'json<|message|>' }}{{- '<|call|>' }}",
        "harmony",
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct with the pythonic template of vLLM": (
        "you MUST put it in the format of [func_name1(params_name1=params_value1, params_name2=params_value2...), "
        "func_name2(params)]{{- '<|header_start|>ipython<|header_end|>' }}",
        "pythonic",
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct with the prompt of llama-stack": (
        "- Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]\nExamples:\nCORRECT: ["
        '{{- tool_call.name + "(" -}}{{- "]<|eot|>" }}{{- "<|header_start|>ipython<|header_end|>" }}',
        "pythonic",
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
        "{{- '<|python_start|>' }}{{- message['content'] }}{{- '<|python_end|>' }}{{- tool_call.function.name }}",
        "llama3_json",
    ),
    "zai-org/GLM-4.5": ("{% for tool in tools %}<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
    "MiniMaxAI/MiniMax-M2": (
        "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}{{- '<invoke name=\"' + tool_call.name + '\">' }}",
        "minimax_m2",
    ),
    "CohereForAI/c4ai-command-r7b-12-2024": (
        'write <|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": name}]<|END_ACTION|>'
        "{{ '<|START_THINKING|>' + message.tool_plan + '<|END_THINKING|>' }}",
        "cohere",
    ),
    "CohereForAI/c4ai-command-r-08-2024": (
        "Write \\'Action:\\' followed by a json-formatted list of actions that you want to perform"
        "{{ '```json\\n[\\n    {\\n        \"tool_name\": title of the tool in the specification,' }}",
        "command_r",
    ),
    "nvidia/Nemotron-Mini-4B-Instruct": (
        "{{ '<extra_id_0>System' }}{% for tool in tools %}{{ '\\n<tool> ' + tool|tojson + ' </tool>' }}{% endfor %}"
        "{{ '<extra_id_1>Assistant\\n' + content }}{{ '<extra_id_1>Tool\\n' + content }}",
        "nemotron_mini",
    ),
    "zai-org/GLM-4-9B-0414": (
        "[gMASK]<sop>{%- if tools -%}<|system|>{%- for tool in tools %}{{ tool.function | tojson }}{%- endfor %}"
        "<|observation|>{{ message.content }}<|assistant|>{{ message.metadata }}",
        "glm4",
    ),
    "THUDM/glm-4-9b-chat": (
        "[gMASK]<sop>{% for item in messages %}{% if item['tools'] is defined %}{% set tools = item['tools'] %}"
        "{% endif %}{% if item['role'] == 'tool' %}<|observation|>{% endif %}{% endfor %}",
        None,
    ),
    "baidu/ERNIE-4.5-21B-A3B-Thinking": (
        "{%- if tools %}<tool>{{ tool | tojson }}</tool>{%- endif %}{{- '<think>\\n' + thoughts + '\\n</think>\\n' }}"
        "{{- '<response>\\n' + content + '\\n</response>\\n' }}"
        "{{- '<tool_call>\\n{\"name\": ' + name + ', \"arguments\": ' + arguments + '}\\n</tool_call>\\n' }}",
        "hermes",
    ),
    "moonshotai/Kimi-K2-Instruct": (
        "<|tool_calls_section_begin|>{%- for tool_call in message['tool_calls'] -%}<|tool_call_begin|>"
        "{{ tool_call['id'] }}<|tool_call_argument_begin|>{{ tool_call['function']['arguments'] | tojson }}",
        "kimi_k2",
    ),
    "LiquidAI/LFM2-1.2B": ('{%- set ns.system_prompt = "List of tools: <|tool_list_start|>[" -%}', "lfm2"),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": (
        '{{- \'<AVAILABLE_TOOLS>[\' -}} <TOOLCALL>[{"name": "...", "arguments": {}}]</TOOLCALL>',
        "nemotron",
    ),
    "ai21labs/AI21-Jamba-1.5-Mini": ('{{- "<tool_calls>[\\n" -}}{{- "]</tool_calls>" -}}', "jamba"),
    "microsoft/Phi-4-mini-instruct": (
        "{% if 'tools' in message %}'<|tool|>' + message['tools'] + '<|/tool|>'",
        "phi4_mini",
    ),
    "swiss-ai/Apertus-8B-Instruct-2509": (
        "{{- '<|tools_prefix|>[' }}{{- '{\"' + tool_call.name + '\": ' + arguments + '}' }}{{- ']<|tools_suffix|>' }}",
        "apertus",
    ),
    "allenai/Olmo-3-7B-Instruct": (
        "{{- '<functions>' + tools | tojson + '</functions>' }}{{- '<function_calls>' }}{{- '</function_calls>' }}",
        "olmo3",
    ),
    "openbmb/MiniCPM3-4B": (
        "{{- '<|thought_start|>\\n' + thought + '\\n<|thought_end|>\\n' }}"
        "{{- '<|tool_call_start|>\\n```python\\n' }}{{- '\\n```\\n<|tool_call_end|>\\n' }}",
        "minicpm3",
    ),
    "internlm/internlm2_5-7b-chat with the template of vLLM": (
        "{{- '<|im_start|>system name=<|plugin|>\\n' }}{{- '<|action_start|><|plugin|>\\n' }}{{- '<|action_end|>' }}",
        "internlm2",
    ),
    "ibm-granite/granite-20b-functioncalling with the template of vLLM": (
        '{{- \'<function_call> {"name": "\' + tool_call.name + \'", "arguments": \' }}',
        "granite_functions",
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("{{'<|im_start|>' + message['role'] + '\\n' + message['content']}}", None),
    "no template": ("", None),
}


@pytest.mark.parametrize("model", TEMPLATES)
def test_the_format_of_a_template(model: str) -> None:
    template, expected = TEMPLATES[model]
    found = find_tool_format(template)
    assert (None if found is None else found.name) == expected
    matching = [name for name, item in tool_formats().items() if item.matches(template)]
    assert matching == ([] if expected is None else [expected])


def llama4_template() -> str:
    """The template of Llama 4 that comes with transformers, without importing its module."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).with_name("models") / "llama4" / "processing_llama4.py"
    for statement in ast.parse(source.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "chat_template":
            return str(ast.literal_eval(statement.value))
    raise AssertionError(f"{source} has no chat_template")


def test_calls_of_llama_4_by_its_own_template() -> None:
    """The text that it writes of an earlier turn, as the model learns to write it, is read back as the same calls."""
    source = llama4_template()
    found = find_tool_format(source)
    assert found is not None
    assert found.name == "llama3_json"
    calls = [("now", {}), ("get_weather", {"city": "Paris"}), ("run", {"options": {"a": [1, None]}, "code": "x"})]
    tool_calls = [{"type": "function", "function": {"name": name, "arguments": values}} for name, values in calls]
    for content in ("", "Let me see."):
        turn = {"role": "assistant", "content": content, "tool_calls": tool_calls}
        messages = [{"role": "user", "content": "Hi"}, turn]
        template = ChatTemplate(source, bos_token="<|begin_of_text|>")
        try:
            text = template.render(messages, tools=TOOLS, add_generation_prompt=False)
        finally:
            template.close()
        assert '"name": "get_weather"' in text.split("Hi<|eot|>")[0]  # the tools are before the question
        answer = text.rsplit("<|header_end|>", 1)[1].strip().removesuffix("<|eot|>")
        text, read = fold(parse(found.name, [answer]))
        assert [(name, json.loads(arguments)) for name, arguments in read] == calls
        assert text.strip() == content


def test_every_format_has_a_template() -> None:
    assert {expected for _, expected in TEMPLATES.values() if expected} == set(tool_formats())


def test_smollm2_itself_knows_neither_tools_nor_thinking(smollm2_path: Path) -> None:
    template = load_tokenizer(open_checkpoint(smollm2_path)).template_source()
    assert template
    assert find_tool_format(template) is None
    assert "tools" not in template
    assert find_reasoning_format(template) is None


@pytest.mark.slow
def test_qwen_itself_writes_hermes(qwen_0_5b_path: Path) -> None:
    template = load_tokenizer(open_checkpoint(qwen_0_5b_path)).template_source()
    found = find_tool_format(template)
    assert found is not None
    assert found.name == "hermes"
    assert "tools" in template


def test_formats_without_templates_can_teach() -> None:
    for item in tool_formats().values():
        assert (item.system_prompt is None) == (item.call == "")
    assert tool_formats()["hermes"].system_prompt is not None
