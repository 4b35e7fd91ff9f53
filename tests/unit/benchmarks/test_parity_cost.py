"""The comparison's cost is measured on models that pass it."""

from benchmarks.parity_cost import make_module, row


def test_a_line_of_the_table():
    module = make_module({"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
                          "num_attention_heads": 2})
    name, size, longest, *seconds = row("smallest", 256, module).strip("| ").split(" | ")
    assert (name, size, longest) == ("smallest", f"{sum(p.numel() for p in module.parameters()):,}", "256")
    assert all(float(number) > 0 for number in seconds)
