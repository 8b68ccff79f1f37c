"""The APIs that agents speak: where a body of each holds its tools, its texts and its calls."""
