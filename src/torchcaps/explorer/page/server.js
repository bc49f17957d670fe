// Questions to the network, answered by the server. browser.js answers the same questions on a page without a server.

// One of the methods of questions.Questions.
async function ask(name, question) {
  const headers = { "Content-Type": "application/json" }, body = JSON.stringify(question);
  const answered = await fetch(`/ask/${name}`, { method: "POST", headers, body }).catch(() => null);
  const answer = await answered?.json().catch(() => null); // nothing where the server failed, or is gone
  if (!answer)
    throw new Error("The explorer does not answer. If it was stopped, start it again; else its terminal says more.");
  if (answer.error) throw new Error(answer.error);
  return answer;
}
