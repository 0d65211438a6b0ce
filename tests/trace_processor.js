// Runs Perfetto's trace processor as a browser's worker would, from the files of a Perfetto UI (engine_bundle.js and
// trace_processor.wasm): requests on stdin, replies on stdout, both as the bytes of TraceProcessorRpcStream.
// Usage: node trace_processor.js DIRECTORY
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const directory = process.argv[2];

// The one request of the bundle, for its WebAssembly, is a synchronous one.
class XMLHttpRequest {
    open(_method, name) {
        this.file = path.join(directory, path.basename(name));
    }
    send() {
        this.response = fs.readFileSync(this.file);
    }
}

function write(bytes) {
    for (let written = 0; written < bytes.length; ) {
        written += fs.writeSync(1, bytes, written);
    }
}

const worker = vm.createContext({
    TextDecoder, TextEncoder, URL, XMLHttpRequest, performance, setTimeout,
    crypto: require("crypto").webcrypto,
    WorkerGlobalScope: class {},
    location: { href: "file:///" },
    console: { log() {}, warn() {}, error: console.error },
});
worker.self = worker;
// An uncaught error shows the line it comes from, and the bundle has but one.
process.on("uncaughtException", (error) => {
    console.error(error.stack.slice(0, 2000));
    process.exit(1);
});
vm.runInContext(fs.readFileSync(path.join(directory, "engine_bundle.js"), "utf8"), worker);
const Bytes = vm.runInContext("Uint8Array", worker);
const port = { postMessage: write };
worker.onmessage({ data: port });
process.stdin.on("data", (request) => port.onmessage({ data: new Bytes(request) }));
