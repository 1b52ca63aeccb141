;;; Recurrent layers, unrolled over time. A cell takes x [b in] and its state, and nil is a state of zeros.
;;; Weights lie [in gates·units]; all start uniform ±1/√units, as torch's.

(defun gate-input (x state units gates)
  "x `input` + h `hidden` + `bias` at the current path: [b in], [b units] or nil -> [b gates·units]."
  (let* ((bound (/ 1 (sqrt units)))
         (start (uniform :low (- bound) :high bound))
         (wide (* gates units))
         (input (param "input" [(dim x -1) wide] :init start))
         (hidden (param "hidden" [units wide] :init start))
         (own (+ (matmul x input) (param "bias" [wide] :init start))))
    (if (null state) own (+ own (matmul state hidden)))))

(defun gate-of (x number units)
  "The slice of gate `number`: [b gates·units] -> [b units]."
  (slice x :axis -1 :start (* number units) :stop (* (+ number 1) units)))

(deflayer rnn-cell (x h units &key (activation tanh))
  "activation(x input + h hidden + bias): x [b in], h [b units] or nil -> [b units] (Elman 1990)."
  (activation (gate-input x h units 1)))

(deflayer lstm-cell (x state units)
  "One step of long short-term memory (Hochreiter and Schmidhuber 1997; gates input, forget, cell, output):
x [b in], state (list h c) of [b units] or nil -> (list h c)."
  (let* ((g (gate-input x (if (null state) nil (first state)) units 4))
         (new (* (sigmoid (gate-of g 0 units)) (tanh (gate-of g 2 units))))
         (c (if (null state) new (+ (* (sigmoid (gate-of g 1 units)) (second state)) new))))
    (list (* (sigmoid (gate-of g 3 units)) (tanh c)) c)))

(deflayer gru-cell (x h units)
  "One step of a gated recurrent unit (Cho et al. 2014; gates reset, update, new; reset after the product, as torch):
x [b in], h [b units] or nil -> [b units]."
  (let* ((bound (/ 1 (sqrt units)))
         (start (uniform :low (- bound) :high bound))
         (input (param "input" [(dim x -1) (* 3 units)] :init start))
         (hidden (param "hidden" [units (* 3 units)] :init start))
         (hidden-bias (param "hidden-bias" [units] :init start))
         (a (+ (matmul x input) (param "bias" [(* 3 units)] :init start)))
         (b (if (null h) nil (matmul h hidden)))
         (sum-of (lambda (i) (if (null b) (gate-of a i units) (+ (gate-of a i units) (gate-of b i units)))))
         (reset (sigmoid (sum-of 0)))
         (update (sigmoid (sum-of 1)))
         (old (if (null b) hidden-bias (+ (gate-of b 2 units) hidden-bias)))
         (new (tanh (+ (gate-of a 2 units) (* reset old)))))
    (if (null h) (* (- 1 update) new) (+ new (* update (- h new))))))

(defun time-steps (x)
  "x [b t …] as a list of t tensors [b …]."
  (mapcar (lambda (i) (squeeze (slice x :axis 1 :start i :stop (+ i 1)) :axis 1)) (range (dim x 1))))

(defun over-time (steps)
  "A list of t tensors [b …] as one [b t …]: undoes `time-steps`."
  (concat (mapcar (lambda (h) (expand-dims h :axis 1)) steps) :axis 1))

(defun unroll (cell inputs &key (state nil))
  "The states after each of a list of inputs; cell is a function (input state) -> state. A list as long as inputs."
  (reverse (reduce (lambda (done x) (cons (cell x (if (null done) state (first done))) done)) inputs :initial-value nil)))

(deflayer rnn (x units &key (activation tanh))
  "The hidden states of an `rnn-cell` over time: [b t in] -> [b t units]."
  (over-time (unroll (lambda (u h) (rnn-cell u h units :activation activation :name "cell" :share (not (null h)))) (time-steps x))))

(deflayer lstm (x units)
  "The hidden states of an `lstm-cell` over time: [b t in] -> [b t units]."
  (over-time (mapcar first (unroll (lambda (u s) (lstm-cell u s units :name "cell" :share (not (null s)))) (time-steps x)))))

(deflayer gru (x units)
  "The hidden states of a `gru-cell` over time: [b t in] -> [b t units]."
  (over-time (unroll (lambda (u h) (gru-cell u h units :name "cell" :share (not (null h)))) (time-steps x))))

(deflayer bidirectional (x units &key (layer gru))
  "A recurrent layer over time and another over the reversed time, side by side: [b t in] -> [b t 2·units] (Schuster and
Paliwal 1997). :layer is `gru`, `lstm` or another function (x units :name …)."
  (concat [(layer x units :name "forward")
           (flip (layer (flip x :axis 1) units :name "backward") :axis 1)]
          :axis -1))
