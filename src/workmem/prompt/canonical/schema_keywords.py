"""Which keywords of JSON Schema hold schemas, and which hold values of the user's."""

from __future__ import annotations

SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords that hold schemas by name. The names are the user's: one of them may well be `enum`."""
ONE_SCHEMA = frozenset(
    {
        "items",
        "additionalProperties",
        "additionalItems",
        "unevaluatedItems",
        "unevaluatedProperties",
        "contains",
        "contentSchema",
        "propertyNames",
        "not",
        "if",
        "then",
        "else",
    }
)
SCHEMAS_IN_LIST = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
"""Keywords that hold a list of schemas. What is in them is sorted, they are not."""
VALUES = frozenset({"enum", "const", "default", "examples"})
"""Keywords that hold values of the user's, which stay as they are at every depth."""
SCHEMAS_OF_TOOL = frozenset({"parameters", "input_schema", "inputSchema", "outputSchema", "output_schema"})
DEPTH_MAX = 64
"""Deeper than this nothing is looked at; no client's schema is."""
