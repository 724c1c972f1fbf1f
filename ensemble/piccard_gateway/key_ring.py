"""Who may come in: the keys of a home, read again when their file changes."""

import logging
from pathlib import Path

from piccard_contract.file_watch import FileWatch

from piccard_gateway.caller import ANYONE, Caller
from piccard_gateway.errors import ApiError
from piccard_gateway.keys import KeyRecord, find_key, read_keys
from piccard_gateway.rate import Rate

_log = logging.getLogger(__name__)


class KeyRing:
    """Once the file is there, a key is needed, also where it holds none that is good or cannot be read any more.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._watch = FileWatch(path)
        self._needed = False
        self._records: dict[str, KeyRecord] = {}
        self._rates: dict[str, Rate] = {}

    def caller(self, authorization: str | None) -> Caller:
        """Who shows this header.

        Raises:
            ApiError: 401 without a good key, 429 where it is used too often.
        """
        if self._watch.changed():
            self._read()
        if not self._needed:
            return ANYONE
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            raise ApiError(401, "missing_api_key", "send your key as `Authorization: Bearer KEY`")
        record = find_key(self._records, key.strip())
        if record is None:
            raise ApiError(401, "invalid_api_key", "the key is not known, or was revoked; ask for another")
        self._spend(record)
        services = None if record.services is None else frozenset(record.services)
        return Caller(record.tenant, record.priority, services)

    def _spend(self, record: KeyRecord) -> None:
        if record.rate is None:
            return
        rate = self._rates.get(record.id)
        if rate is None or rate.per_minute != record.rate:
            rate = self._rates[record.id] = Rate(record.rate)
        wait = rate.take()
        if wait:
            sentence = f"this key may send {record.rate:g} requests a minute; wait {wait:.3g} s"
            raise ApiError(429, "rate_limit_exceeded", sentence, retry_after=wait)

    def _read(self) -> None:
        if self._watch.signature() is None:
            # Whoever removes the file opens the door on purpose.
            self._needed, self._records = False, {}
            return
        self._needed = True
        try:
            self._records = {record.id: record for record in read_keys(self._watch.path).keys}
        except (OSError, ValueError) as error:
            _log.error("%s cannot be read (%s); the keys before stay in use", self._watch.path, error)
