"""Coroutine tests, in which MARK is replaced by the runner's mark."""

import contextlib

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

pytestmark = pytest.mark.MARK


async def test_consumer_on_the_same_loop_commits_its_offset(kafka):
    orders = await kafka.aio.topic("orders", partitions=2)
    consumer = AIOKafkaConsumer(
        orders,
        bootstrap_servers=kafka.bootstrap,
        group_id="shop",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    async with consumer, AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as producer:
        group = await kafka.aio.wait_for_group("shop", members=1)
        assert group.kind == "classic"
        await producer.send_and_wait(orders, b"one", partition=1)
        assert (await consumer.getone()).value == b"one"
        await consumer.commit()
        await kafka.aio.assert_committed("shop", {orders: {1: 1}})
        # A blocking call only stops the clients of this event loop, and only for a moment.
        assert [record.value for record in kafka.records(orders)] == [b"one"]
    assert len(kafka.wait_for_group("shop", members=0).members) == 0


async def test_aborted_transaction_is_hidden_from_committed_reads(kafka):
    producer = AIOKafkaProducer(
        bootstrap_servers=kafka.bootstrap, transactional_id="payments", client_id="cashier"
    )
    async with producer:
        with contextlib.suppress(ZeroDivisionError):
            async with producer.transaction():
                await producer.send_and_wait("orders", b"aborted")
                (transaction,) = await kafka.aio.transactions()
                assert transaction.transactional_id == "payments"
                assert transaction.state == "Ongoing"
                assert transaction.partitions == (("orders", 0),)
                assert transaction.client == "cashier@127.0.0.1"
                assert transaction.age_ms < transaction.timeout_ms
                assert await kafka.aio.records("orders", isolation="read_committed") == []
                _ = 1 / 0
        async with producer.transaction():
            await producer.send_and_wait("orders", b"committed")
    seen = await kafka.aio.records("orders", isolation="read_committed", at_least=1)
    assert [record.value for record in seen] == [b"committed"]
    assert len(await kafka.aio.records("orders")) == 2
    assert kafka.transactions() == []
    assert "transaction-aborted" in [entry.what for entry in kafka.history("payments")]


async def test_wait_that_cannot_end_describes_the_group(kafka):
    with pytest.raises(
        TimeoutError, match=r"group shop Stable: there is no group.*await kafka.aio"
    ):
        kafka.wait_for_group("shop", timeout=0.1)
    with pytest.raises(TimeoutError, match="there is no group") as caught:
        await kafka.aio.wait_for_group("shop", timeout=0.1)
    assert "kafka.aio" not in str(caught.value)
