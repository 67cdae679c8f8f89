"""Chat with a running cluster: `python examples/chat.py [URL]`, by default http://127.0.0.1:8000."""

import sys

import openai


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused")
    model = client.models.list().data[0].id
    messages: list[dict[str, str]] = []
    print(f"{model} at {url}; an empty line ends")
    while question := input("> "):
        messages.append({"role": "user", "content": question})
        answer = ""
        for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=400, stream=True):
            piece = chunk.choices[0].delta.content or "" if chunk.choices else ""
            print(piece, end="", flush=True)
            answer += piece
        print()
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
