"""The base of all JSON objects that the server reads."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Fields(BaseModel):
    """A JSON object that rejects unknown fields."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
