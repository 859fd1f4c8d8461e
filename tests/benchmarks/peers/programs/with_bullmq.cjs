// One job of BullMQ: `node with_bullmq.cjs COMMAND …`, or `worker`.
const fs = require("fs");
const { Queue, Worker } = require("bullmq");

const url = new URL(process.env.PEER_BROKER);
const connection = { host: url.hostname, port: Number(url.port), maxRetriesPerRequest: null };
const NAME = "peers";
const WARM_UP = 200;
const now = () => Date.now() / 1000;

async function eachOf(count, make) {
  const queue = new Queue(NAME, { connection, defaultJobOptions: { removeOnComplete: true } });
  for (let number = 0; number < count; number++) {
    const [due, delay] = await make(number);
    await queue.add("work", { number, due }, delay ? { delay } : {});
  }
  await queue.close();
}

const commands = {
  versions: async () => `bullmq ${require("bullmq/package.json").version}, node ${process.versions.node}`,
  async send(count) {
    let began = 0;
    await eachOf(WARM_UP + count, async (number) => {
      if (number === WARM_UP) began = performance.now();
      return [0, 3_600_000];
    });
    return (count / (performance.now() - began)) * 1000;
  },
  fill: (count) => eachOf(count, async () => [0, 0]),
  at: (count, due) => eachOf(count, async () => [due, Math.round((due - now()) * 1000)]),
  async steady(count, rate) {
    const began = now();
    await eachOf(count, async (number) => {
      const pause = Math.max(began + number / rate - now(), 0) * 1000;
      if (pause) await new Promise((resolve) => setTimeout(resolve, pause));
      const delay = Math.round(1000 + Math.random() * 9000);
      return [now() + delay / 1000, delay];
    });
  },
  async worker() {
    const ledger = fs.openSync(process.env.PEER_LEDGER, "a");
    const work = async (job) => {
      const line = Buffer.alloc(24);
      line.writeBigInt64LE(BigInt(job.data.number), 0);
      line.writeDoubleLE(job.data.due, 8);
      line.writeDoubleLE(now(), 16);
      fs.writeSync(ledger, line);
    };
    const worker = new Worker(NAME, work, { connection, concurrency: Number(process.env.PEER_SLOTS) });
    await worker.waitUntilReady();
    fs.writeFileSync(process.env.PEER_LEDGER.replace(/\.[^.]*$/, ".ready"), "");
    await new Promise(() => {});
  },
};

const [name, ...numbers] = process.argv.slice(2);
commands[name](...numbers.map(Number)).then((found) => {
  console.log(JSON.stringify(found ?? null));
});
