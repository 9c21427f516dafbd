"""``format("fencepost")``: what Spark finds under that name.

What reads and writes is imported when it is asked for: Spark loads every data source's module in
each session, also of those who never use it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from fencepost.pipelines.spark.errors import speaks_plainly

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


@speaks_plainly
class FencepostDataSource(DataSource):
    """A topic as a table or as a stream, with the options of Spark's own Kafka connector."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._planning = True

    def __getstate__(self) -> dict[str, Any]:
        # Spark makes one instance per batch to plan its job, and commits with a pickled copy of
        # another: the planning call is told from the committing one by what pickling drops.
        return self.__dict__ | {"_planning": False}

    @classmethod
    def name(cls) -> str:
        """The name behind ``format``."""
        return "fencepost"

    def schema(self) -> str:
        """The columns of the stock Kafka source."""
        from fencepost.pipelines.spark.read import ddl  # noqa: PLC0415 - see the module

        wanted = str(self.options.get("includeHeaders", "false")).strip().lower() == "true"
        return ddl(with_headers=wanted)

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - Spark's signature
        """Reads from starting to ending offsets."""
        from fencepost.pipelines.spark.source import batch_reader  # noqa: PLC0415 - see the module

        return batch_reader(self.options)

    def streamReader(  # noqa: N802 - Spark's name
        self,
        schema: StructType,  # noqa: ARG002 - Spark's signature
    ) -> DataSourceStreamReader:
        """Reads from the starting offsets on."""
        from fencepost.pipelines.spark.source import stream_reader  # noqa: PLC0415 - see the module

        return stream_reader(self.options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Writes a DataFrame as one transaction."""
        from fencepost.pipelines.spark.sink import batch_writer  # noqa: PLC0415 - see the module

        return batch_writer(self.options, schema, overwrite=overwrite)

    def streamWriter(  # noqa: N802 - Spark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: ARG002 - Spark's signature
    ) -> DataSourceStreamWriter:
        """Writes each micro-batch as one transaction that also holds the batch's number."""
        from fencepost.pipelines.spark.sink import stream_writer  # noqa: PLC0415 - see the module

        return stream_writer(self.options, schema, planning=self._planning)
