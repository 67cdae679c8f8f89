"""What the settings of a connector (`kv_connector_extra_config`) have in common."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from kv_transfer.config import KVTransferConfig


class ConnectorSettings(BaseModel):
    """Frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def of(cls, config: KVTransferConfig) -> Self:
        """Raises ValueError, naming key, value and what is known instead."""
        try:
            return cls.model_validate(config.kv_connector_extra_config)
        except ValidationError as error:
            told = "; ".join(
                ".".join(("kv_connector_extra_config", *map(str, part["loc"])))
                + ("" if part["type"] == "missing" else f" is {_shown(part['loc'], part['input'])}")
                + f": {part['msg']}"
                for part in error.errors()
            )
            known = ", ".join(f"{name} ({field.description})" for name, field in cls.model_fields.items())
            raise ValueError(f"{told}. {config.kv_connector} knows {known}") from None


def _shown(loc: tuple[int | str, ...], value: object) -> str:
    # A URL may hold a password.
    return "refused" if loc and loc[-1] == "url" else repr(value)
