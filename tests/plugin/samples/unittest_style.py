"""Tests as methods of a unittest.TestCase."""

import unittest

import pytest


class TestOrders(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def _broker(self, kafka):
        self.kafka = kafka

    def test_one(self):
        self.kafka.produce("orders", "one")
        assert len(self.kafka.records("orders")) == 1

    @pytest.mark.kafka(topics={"orders": 2})
    def test_two(self):
        assert self.kafka.produce("orders", "one", partition=1)[0].offset == 0


class TestAsync(unittest.IsolatedAsyncioTestCase):
    @pytest.fixture(autouse=True)
    def _broker(self, kafka_module):
        self.kafka = kafka_module

    async def test_coroutine(self):
        from aiokafka import AIOKafkaProducer

        orders = await self.kafka.aio.topic("orders")
        async with AIOKafkaProducer(bootstrap_servers=self.kafka.bootstrap) as producer:
            await producer.send_and_wait(orders, b"one")
        assert len(await self.kafka.aio.records(orders)) == 1
