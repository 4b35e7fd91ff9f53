"""Answers in a pipe and on a terminal."""

import io

from rlhf_ray.stages.generate import print_answer

ROW = {"prompt": "Why?", "response": " Because.\x1b[31m", "tokens": 3, "finish_reason": "stop"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_in_a_pipe_it_is_plain_text_without_control_characters():
    stream = io.StringIO()
    print_answer(ROW, stream)
    print_answer({**ROW, "finish_reason": "length", "score": 1.23456}, stream, prompt=False)
    assert stream.getvalue() == ("prompt: Why?\nresponse: Because.\\x1b[31m\n(3 tokens, finished)\n\n"
                                 "response: Because.\\x1b[31m\n(3 tokens, cut at --max-tokens, score 1.235)\n\n")


def test_on_a_terminal_an_empty_answer_is_seen(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    print_answer({**ROW, "response": ""}, stream)
    assert "Why?" in stream.getvalue() and "(nothing)" in stream.getvalue()
