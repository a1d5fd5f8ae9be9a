"""Small agents on each SDK and library, as people write them: their endpoint comes from the variables alone.

Each works through `task["prompt"]` with one tool, `bash`, and returns the model's last words.
"""

import json
import subprocess

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
CHAT_TOOL = {"type": "function", "function": {"name": "bash", "description": "Run it.", "parameters": PARAMETERS}}


def bash(command: str) -> str:
    """Run a command in the shell."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    return done.stdout + done.stderr


def openai_chat(task):
    import openai

    client, messages = openai.OpenAI(), [{"role": "user", "content": task["prompt"]}]
    while True:
        chat = client.chat.completions.create(model="gpt", messages=messages, tools=[CHAT_TOOL])
        message = chat.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            said = bash(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


def openai_chat_streamed(task):
    import openai

    client, messages = openai.OpenAI(), [{"role": "user", "content": task["prompt"]}]
    while True:
        with client.chat.completions.stream(model="gpt", messages=messages, tools=[CHAT_TOOL]) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            said = bash(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


def openai_responses(task):
    import openai

    tool = {"type": "function", "name": "bash", "parameters": PARAMETERS, "strict": False}
    client, items = openai.OpenAI(), [{"role": "user", "content": task["prompt"]}]
    while True:
        with client.responses.stream(model="gpt", input=items, tools=[tool], store=False) as stream:
            response = stream.get_final_response()
        items += [item.to_dict(exclude_unset=False) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            said = bash(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": said})


def anthropic_messages(task, *, streamed=True):
    import anthropic

    tool = {"name": "bash", "description": "Run it.", "input_schema": PARAMETERS}
    client, messages = anthropic.Anthropic(), [{"role": "user", "content": task["prompt"]}]
    while True:
        request = {"model": "claude", "max_tokens": 1000, "messages": messages, "tools": [tool]}
        if streamed:
            with client.messages.stream(**request) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**request)
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return message.content[-1].text
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": bash(**call.input)} for call in calls]
        messages.append({"role": "user", "content": results})


def anthropic_unstreamed(task):
    return anthropic_messages(task, streamed=False)


def google_genai(task):
    from google import genai

    client = genai.Client()
    chat = client.chats.create(model="gemini", config=genai.types.GenerateContentConfig(tools=[bash]))
    return chat.send_message(task["prompt"]).text


def litellm_chat(task):
    import litellm

    messages = [{"role": "user", "content": task["prompt"]}]
    while True:
        message = litellm.completion(model="openai/policy", messages=messages, tools=[CHAT_TOOL]).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            said = bash(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})


def openai_agents(task):
    import agents

    agent = agents.Agent(name="agent", model="policy", tools=[agents.function_tool(bash)])
    return agents.Runner.run_sync(agent, task["prompt"]).final_output


def langchain(task):
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model="policy"), tools=[bash])
    return agent.invoke({"messages": [("user", task["prompt"])]})["messages"][-1].content


def langchain_anthropic(task):
    from langchain.agents import create_agent
    from langchain_anthropic import ChatAnthropic

    agent = create_agent(ChatAnthropic(model="policy"), tools=[bash])
    return agent.invoke({"messages": [("user", task["prompt"])]})["messages"][-1].text


def judge(task, folder):
    """1 if the word stands in the file."""
    answer = folder / "workspace" / "out.txt"
    return float(answer.is_file() and task["word"] in answer.read_text())
