"""Stream a chat from a server, and constrain an answer to a JSON schema. Start the server first: jpaged serve

python examples/client.py [URL]
"""

import sys

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main(url: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    story = [{"role": "user", "content": "Tell me a story about a fox."}]
    for chunk in client.chat.completions.create(model=model, messages=story, max_tokens=64, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    person = [{"role": "user", "content": "Who are you?"}]
    answer = client.chat.completions.create(model=model, messages=person, max_tokens=200, response_format=form)
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main(*sys.argv[1:])
