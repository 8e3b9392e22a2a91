"""What Farhand ships for testing what is built on it: models without a network."""

from farhand.testing.models import FunctionModel, ReplayModel, ScriptedModel, code, tool_call

__all__ = ["FunctionModel", "ReplayModel", "ScriptedModel", "code", "tool_call"]
