"""``format("fencepost")``, as Spark finds it.

Readers and writers are imported on demand: Spark loads every data source's module in each session,
even if the session never uses it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from fencepost.pipelines.spark.errors import plain_errors

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


@plain_errors
class FencepostDataSource(DataSource):
    """A topic as a table or as a stream, with the options of Spark's own Kafka connector."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._planning = True

    def __getstate__(self) -> dict[str, Any]:
        # For each batch Spark calls streamWriter twice: on a new instance to plan the job, and on
        # an unpickled copy to commit. Pickling clears the flag, so that streamWriter can tell.
        return self.__dict__ | {"_planning": False}

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "fencepost"

    def schema(self) -> str:
        """Return the columns of the stock Kafka source."""
        from fencepost.pipelines.spark.read import ddl  # noqa: PLC0415 - see the module

        with_headers = str(self.options.get("includeHeaders", "false")).strip().lower() == "true"
        return ddl(with_headers=with_headers)

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002 - Spark's signature
        """Return a reader of the records from the starting to the ending offsets."""
        from fencepost.pipelines.spark.source import batch_reader  # noqa: PLC0415 - see the module

        return batch_reader(self.options)

    def streamReader(  # noqa: N802 - Spark's name
        self,
        schema: StructType,  # noqa: ARG002 - Spark's signature
    ) -> DataSourceStreamReader:
        """Return a reader of the records from the starting offsets on."""
        from fencepost.pipelines.spark.source import stream_reader  # noqa: PLC0415 - see the module

        return stream_reader(self.options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return a writer that writes a DataFrame in one transaction."""
        from fencepost.pipelines.spark.sink import batch_writer  # noqa: PLC0415 - see the module

        return batch_writer(self.options, schema, overwrite=overwrite)

    def streamWriter(  # noqa: N802 - Spark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: ARG002 - Spark's signature
    ) -> DataSourceStreamWriter:
        """Return a writer with one transaction per micro-batch, which holds the batch's number."""
        from fencepost.pipelines.spark.sink import stream_writer  # noqa: PLC0415 - see the module

        return stream_writer(self.options, schema, planning=self._planning)
